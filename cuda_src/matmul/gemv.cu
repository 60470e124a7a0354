// y = W x for a few tokens: weights are read once for up to TOKEN_TILE tokens, by integer dot products.
//
//   out[t][n] (+)= scale * row_scale[t] * (sum over k of W[n][k] x[t][k] + bias[n])
//
// Grid: x = blocks of BLOCK_WARPS * 32 / ROW_LANES * LANE_ROWS rows, of all matrices one after the other; y = tiles of TOKEN_TILE tokens.
// -DFORMAT_A (and _B, _C for matrices of other formats) name of a format; -D of matmul/product.cuh. Moves the bytes of
// the matrices, once per tile of tokens.

#if TOKEN_TILE == 1 && LANE_ROWS <= 2
#define WEIGHTS_HERE
#define EARLY_WORDS 32
#define READY [] { follow_predecessor(); }
#else
#define READY Nothing()
#endif

#include "matmul/ahead.cuh"
#include "matmul/product.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS * 32, RESIDENT_THREADS / (BLOCK_WARPS * 32))
    gemv(const float* x_f32,    // [T, width]
         const i8* x_values,    // [T, width]
         const float* x_scales, // [T, width / 32]
         const int* x_sums,     // [T, width / 32]
         MATRICES,
         const float* row_scale,  // [T], or null
         float scale, int add, int width, int n_tokens) {
    PICK_MATRIX(m, (int)blockIdx.x);
    fetch_rows_ahead(m, BLOCK_WARPS * (32 / ROW_LANES) * LANE_ROWS, width);
#ifndef WEIGHTS_HERE
    follow_predecessor();
#endif
    ActView x = {x_f32, x_values, x_scales, x_sums, width};
    Finish finish = {row_scale, scale, add};
    product_of_kind(m, finish, x, n_tokens, READY);
}
