// Y = W X for many tokens, on tensor cores: packed weights are decoded once for TILE_M tokens.
//
//   out[t][n] (+)= scale * row_scale[t] * (sum over k of W[n][k] x[t][k] + bias[n]),  x[t][k] = x_scale[t] * halves[t][k]
//
// Grid: x = tiles of TILE_M tokens, y = tiles of TILE_N rows of all matrices one after the other (tiles that share
// weights run at the same time). -DFORMAT_A (and _B, _C for matrices of other formats); -DTILE_N 128 (many tokens), 32
// (16 to about 100, where reading the weights is what takes time); -DTILE_M 128 64 | 32 16.

#include "common/follow.cuh"
#include "matmul/matrices.cuh"
#include "matmul/tile.cuh"

template <class F>
__device__ __forceinline__ void product(const Matrix& m, const Finish& finish, TileInput& in, const float* x_scales,
                                        int n_tokens, __half* shared) {
    int first_row = (blockIdx.y - m.first) * TILE_N, first_token = blockIdx.x * TILE_M;
    int row = first_row + tile_weight_row();
    in.weight_row = row < m.n_out ? m.weight + (i64)row * (in.width / F::BLOCK) * F::BYTES : nullptr;
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) {
        int token = first_token + tile_x_row(i);
        in.x_rows[i] = token < n_tokens ? token : -1;
    }
    TileSums sums;
    if (!tile_product<F, F>(in, shared, sums)) return;
    float scales[FRAGMENTS_M][2];  // all asked for before the first store, after which the compiler may not move them
#pragma unroll
    for (int j = 0; j < FRAGMENTS_M; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) scales[j][c] = x_scales[min(first_token + sum_token(j, c), n_tokens - 1)];
    }
#pragma unroll
    for (int j = 0; j < FRAGMENTS_M; j++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int token = first_token + sum_token(j, c);
            if (token >= n_tokens) continue;
#pragma unroll
            for (int i = 0; i < FRAGMENTS_N; i++) {
                int n = first_row + sum_row(i, c);
                if (n < m.n_out) finish_product(m, finish, token, n, sums[i][j][c] * scales[j][c & 1]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)
    gemm(const __half* x,         // [T, width]
         const float* x_scales,   // [T]
         MATRICES,
         const float* row_scale,  // [T], or null
         float scale, int add, int width, int n_tokens) {
    follow_predecessor();
    extern __shared__ __align__(16) __half shared[];
    PICK_MATRIX(m, (int)blockIdx.y);
    Finish finish = {row_scale, scale, add};
    TileInput in;
    in.x = x;
    in.width = width;
#ifdef FORMAT_C
    if (m.kind == 2) return product<FORMAT_C>(m, finish, in, x_scales, n_tokens, shared);
#endif
#ifdef FORMAT_B
    if (m.kind == 1) return product<FORMAT_B>(m, finish, in, x_scales, n_tokens, shared);
#endif
    product<FORMAT_A>(m, finish, in, x_scales, n_tokens, shared);
}
