// A block's rows of one of the matrices of a launch, times a few tokens.
// -DTOKEN_TILE 1 2 4 8; -DROW_LANES lanes a row 8 16 32; -DLANE_ROWS rows a lane 1 2 4; -DBLOCK_WARPS warps a block.
#pragma once

#include "matmul/matrices.cuh"
#include "matmul/rows.cuh"

// ready(): called once by all threads, after the first weights are asked for; x may be read from then on.
template <class F, class Ready>
__device__ __forceinline__ void product(const Matrix& m, const Finish& finish, const ActView& x, int n_tokens, Ready ready) {
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
    row_dots<F, ROW_LANES, LANE_ROWS, TOKEN_TILE>(rows, x, tokens, n_tokens - first_token, sub, acc, ready);
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

// The same for the type of the matrix.
template <class Ready = Nothing>
__device__ __forceinline__ void product_of_kind(const Matrix& m, const Finish& finish, const ActView& x, int n_tokens,
                                                Ready ready = {}) {
#ifdef FORMAT_C
    if (m.kind == 2) return product<FORMAT_C>(m, finish, x, n_tokens, ready);
#endif
#ifdef FORMAT_B
    if (m.kind == 1) return product<FORMAT_B>(m, finish, x, n_tokens, ready);
#endif
    product<FORMAT_A>(m, finish, x, n_tokens, ready);
}
