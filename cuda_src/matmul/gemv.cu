// y = W x for a few tokens: weights are read once for up to TOKEN_TILE tokens, by integer dot products.
//
//   out[t][n] (+)= scale * row_scale[t] * (sum over k of W[n][k] x[t][k] + bias[n])
//
// Grid: x = blocks of BLOCK_WARPS * 32 / ROW_LANES * LANE_ROWS rows, of all matrices one after the other; y = tiles of TOKEN_TILE tokens.
// -DFORMAT_A (and _B, _C for matrices of other formats) name of a format; -DTOKENS 1 2 4 8; -DLANES lanes a row 8 16 32;
// -DROWS rows a lane 1 2 4; -DWARPS warps a block. Moves the bytes of the matrices, once per tile of tokens.

#include "matmul/ahead.cuh"
#include "matmul/rows.cuh"

template <class F>
__device__ __forceinline__ void product(const Matrix& m, const Finish& finish, const ActView& x, int n_tokens) {
    int lane = threadIdx.x & 31, sub = lane % ROW_LANES;
    int group = (threadIdx.x >> 5) * (32 / ROW_LANES) + lane / ROW_LANES;
    int first = ((blockIdx.x - m.first) * BLOCK_WARPS * (32 / ROW_LANES) + group) * LANE_ROWS;
    int first_token = blockIdx.y * TOKEN_TILE;
    i64 row_bytes = (i64)(x.width / F::BLOCK) * F::BYTES;
    const u8* rows[LANE_ROWS];
    int tokens[TOKEN_TILE];
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) rows[r] = m.weight + (i64)min(first + r, m.n_out - 1) * row_bytes;
#pragma unroll
    for (int t = 0; t < TOKEN_TILE; t++) tokens[t] = min(first_token + t, n_tokens - 1);
    float acc[LANE_ROWS][TOKEN_TILE];
    row_dots<F, ROW_LANES, LANE_ROWS, TOKEN_TILE>(rows, x, tokens, n_tokens - first_token, sub, acc);
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
#pragma unroll
        for (int t = 0; t < TOKEN_TILE; t++) {
            bool mine = (r * TOKEN_TILE + t) % ROW_LANES == sub;
            if (mine && first + r < m.n_out && first_token + t < n_tokens)
                finish_product(m, finish, first_token + t, first + r, acc[r][t]);
        }
    }
}

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
    follow_predecessor();
    ActView x = {x_f32, x_values, x_scales, x_sums, width};
    Finish finish = {row_scale, scale, add};
#ifdef FORMAT_C
    if (m.kind == 2) return product<FORMAT_C>(m, finish, x, n_tokens);
#endif
#ifdef FORMAT_B
    if (m.kind == 1) return product<FORMAT_B>(m, finish, x, n_tokens);
#endif
    product<FORMAT_A>(m, finish, x, n_tokens);
}
