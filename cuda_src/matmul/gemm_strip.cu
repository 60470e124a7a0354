// Y = W X for some tokens, on tensor cores, weights decoded in registers (strip.cuh).
//
//   out[t][n] (+)= scale * row_scale[t] * (sum over k of W[n][k] x[t][k] + bias[n]),  x[t][k] = x_scale[t] * halves[t][k]
//
// Grid: x = blocks of WARPS_N * 16 rows of all matrices one after the other, y = tiles of STRIP_TOKENS tokens.
// -DFORMAT_A (and _B, _C); -DSTRIP_TOKENS 8 16 32; -DWARPS_N, -DWARPS_K; the rest as in strip.cuh.

#if STRIP_AHEAD
#define WEIGHTS_HERE
#endif

#include "matmul/ahead.cuh"
#include "matmul/strip.cuh"

template <class F, class Ready>
__device__ __forceinline__ void product(const Matrix& m, const Finish& finish, const __half* x, const float* x_scales,
                                        int width, int n_tokens, __half* shared, Ready ready) {
    int row = (blockIdx.x - m.first) * WARPS_N * 16 + strip_row(), first_token = blockIdx.y * STRIP_TOKENS;
    i64 row_bytes = (i64)(width / F::BLOCK) * F::BYTES;
    const u8* lower = m.weight + min(row, m.n_out - 1) * row_bytes;
    const u8* upper = m.weight + min(row + 8, m.n_out - 1) * row_bytes;
    StripSums sums;
    auto x_row = [&](int i) { return first_token + i; };
    int count = min(STRIP_TOKENS, n_tokens - first_token);
    if (!strip_product<F, F>(lower, upper, x, width, x_row, count, shared, ready, sums)) return;
    float scales[TOKEN_TILES][2];  // all asked for before the first store
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) scales[j][c] = x_scales[min(first_token + strip_token(j, c), n_tokens - 1)];
    }
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int token = first_token + strip_token(j, c), n = row + (c & 2) * 4;
            if (token < n_tokens && n < m.n_out) finish_product(m, finish, token, n, sums[j][c] * scales[j][c & 1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(STRIP_THREADS, STRIP_BLOCKS)
    gemm_strip(const __half* x,         // [T, width]
               const float* x_scales,   // [T]
               MATRICES,
               const float* row_scale,  // [T], or null
               float scale, int add, int width, int n_tokens) {
    extern __shared__ __align__(16) __half shared[];
    PICK_MATRIX(m, (int)blockIdx.x);
    fetch_rows_ahead(m, WARPS_N * 16, width);
    auto ready = [] { follow_predecessor(); };
    Finish finish = {row_scale, scale, add};
#ifdef FORMAT_C
    if (m.kind == 2) return product<FORMAT_C>(m, finish, x, x_scales, width, n_tokens, shared, ready);
#endif
#ifdef FORMAT_B
    if (m.kind == 1) return product<FORMAT_B>(m, finish, x, x_scales, width, n_tokens, shared, ready);
#endif
    product<FORMAT_A>(m, finish, x, x_scales, width, n_tokens, shared, ready);
}
