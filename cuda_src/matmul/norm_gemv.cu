// y = W norm(x) for one token: every block norms the row for itself (matmul/normed.cuh), all together leave it in memory.
//
//   out[n] (+)= scale * (sum over k of W[n][k] normed[k] + bias[n])
//
// Grid: x = blocks of BLOCK_WARPS * 32 / ROW_LANES * LANE_ROWS rows, of all matrices one after the other. Results are those
// of pointwise/norm.cu and matmul/gemv.cu, bit for bit. -DNORM_WIDTH as in matmul/normed.cuh; others as in matmul/gemv.cu,
// with TOKEN_TILE 1. Moves the bytes of the matrices.

#define WEIGHTS_HERE
#define EARLY_WORDS 32
#define STAGE_WORDS 16  // they are in registers while the row is normed

#include "matmul/ahead.cuh"
#include "matmul/normed.cuh"
#include "matmul/product.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS * 32, RESIDENT_THREADS / (BLOCK_WARPS * 32))
    norm_gemv(const float* x,            // [width]
              const float* norm_weight,  // [width]
              float norm_eps,
              float* normed,             // [width]
              ACT_PARAMETERS,            // of normed
              MATRICES, float scale, int add) {
    PICK_MATRIX(m, (int)blockIdx.x);
    fetch_rows_ahead(m, BLOCK_WARPS * (32 / ROW_LANES) * LANE_ROWS, NORM_WIDTH);
    __shared__ __align__(16) NormedRow row;
    float factor[NORM_EACH][4];
    load_norm(factor, norm_weight);
    ActView view = {row.f32, row.values, row.scales, row.sums, NORM_WIDTH};
    Finish finish = {nullptr, scale, add};
    product_of_kind(m, finish, view, 1, [&] {
        follow_predecessor();
        norm_row<true>(row, x, factor, norm_eps);
    });
    leave_normed(row, normed, ACT_ARGUMENTS, 0);
}
