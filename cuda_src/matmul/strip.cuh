// A strip of W x on tensor cores: a warp takes 16 weight rows and STRIP_TOKENS tokens, and decodes packed weights in
// registers straight into the fragments that the tensor cores take. For a few to some tens of tokens, where the time goes
// into reading the weights.
//
//   step s: lane l = 4 g + t holds piece 4 s + t of rows g and g + 8; the 8 products of a step take 4 elements of each of
//   the 4 lanes' pieces. K has no order of its own, so activations are laid out in the order of the pieces:
//
//   shared memory  [token][piece of the chunk][32 halves + 8 of padding] + 32 halves of padding a token
//
// WARPS_N warps have 16 rows each; WARPS_K warps share rows and take every WARPS_K-th step; their sums are added in order.
// The paddings put the 8 accesses of 16 bytes that are served together into different banks.
#pragma once

#include "common/mma.cuh"
#include "quants/all.cuh"

#define STRIP_THREADS (32 * WARPS_N * WARPS_K)
// Blocks that a multiprocessor must be able to hold: bounds the registers of a thread, see rows.cuh.
#define STRIP_BLOCKS ((STRIP_TOKENS == 8 ? 768 : 512) / STRIP_THREADS)
#define PIECE_HALVES 40
#define TOKEN_HALVES (CHUNK_PIECES * PIECE_HALVES + 32)
// Dynamic shared memory; ops/cuda/matmul.py computes the same number.
#define STRIP_SHARED_BYTES (2 * STRIP_TOKENS * TOKEN_HALVES)
#define TOKEN_TILES (STRIP_TOKENS / 8)
#ifndef STRIP_DEPTH
#define STRIP_DEPTH 1
#endif
static_assert(CHUNK_PIECES % 4 == 0 && STRIP_TOKENS % 8 == 0, "whole steps and whole tiles");
static_assert(WARPS_K == 1 || STRIP_SHARED_BYTES >= WARPS_N * 128 * TOKEN_TILES * 4, "room for one warp's sums");

typedef float StripSums[TOKEN_TILES][4];

// x_row(i): row of activations of token i of the strip, or -1 (zeros). first: first piece of the chunk.
template <class F, class XRow>
__device__ __forceinline__ void copy_x_chunk(const __half* x, int width, int first, XRow x_row, __half* shared) {
    int n_pieces = width / 32;
    for (int i = threadIdx.x; i < STRIP_TOKENS * CHUNK_PIECES * 4; i += STRIP_THREADS) {
        int token = i / (CHUNK_PIECES * 4), rest = i % (CHUNK_PIECES * 4), piece = first + rest / 4, part = rest % 4;
        int row = x_row(token);
        bool wanted = row >= 0 && piece < n_pieces;
        const __half* from = x + (wanted ? (i64)row * width + F::group(piece, part / 2) + 8 * (part & 1) : 0);
        copy_async16(shared + token * TOKEN_HALVES + rest / 4 * PIECE_HALVES + part * 8, from, wanted);
    }
    commit_copies();
}

// Half a step: lower = the decoded group of row g, upper = of row g + 8; x_group: the activations of that group.
__device__ __forceinline__ void multiply_group(const u32 (&lower)[8], const u32 (&upper)[8], const __half* x_group,
                                               StripSums& sums) {
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) {
#pragma unroll
        for (int part = 0; part < 2; part++) {
            uint4 v = *(const uint4*)(x_group + j * 8 * TOKEN_HALVES + part * 8);
            u32 a[4] = {lower[4 * part], upper[4 * part], lower[4 * part + 1], upper[4 * part + 1]};
            multiply_add(sums[j], a, v.x, v.y);
            u32 b[4] = {lower[4 * part + 2], upper[4 * part + 2], lower[4 * part + 3], upper[4 * part + 3]};
            multiply_add(sums[j], b, v.z, v.w);
        }
    }
}

// Adds the product over all of K; a null row counts as zeros.
template <class F, class XRow>
__device__ __forceinline__ void strip_pass(const u8* lower_row, const u8* upper_row, const __half* x, int width, XRow x_row,
                                           __half* shared, StripSums& sums) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp_k = (threadIdx.x >> 5) / WARPS_N;
    int n_pieces = width / 32;
    const __half* x_at = shared + g * TOKEN_HALVES + t * PIECE_HALVES;
    typename F::Raw raw[STRIP_DEPTH][2];
    // The step's place in K advances by WARPS_K steps, through all chunks; a chunk is a whole number of such rounds.
    auto load_step = [&](int step, typename F::Raw (&r)[2]) {
        int piece = step * 4 + t;
        if (piece < n_pieces) {
            if (lower_row) F::load(lower_row, piece, r[0]);
            if (upper_row) F::load(upper_row, piece, r[1]);
        }
    };
#pragma unroll
    for (int d = 0; d < STRIP_DEPTH; d++) load_step(warp_k + d * WARPS_K, raw[d]);
    int n_steps = (n_pieces + 3) / 4;
    for (int chunk = 0; chunk * (CHUNK_PIECES / 4) < n_steps; chunk++) {
        if (chunk) __syncthreads();
        copy_x_chunk<F>(x, width, chunk * CHUNK_PIECES, x_row, shared);
        wait_copies<0>();
        __syncthreads();
        for (int round = 0; round < CHUNK_PIECES / 4 / WARPS_K; round += STRIP_DEPTH) {
#pragma unroll
            for (int d = 0; d < STRIP_DEPTH; d++) {
                int in_chunk = (round + d) * WARPS_K + warp_k, step = chunk * (CHUNK_PIECES / 4) + in_chunk;
                if (step < n_steps) {
                    int piece = step * 4 + t;
                    typename SourceOf<F>::type lower_source(raw[d][0], piece), upper_source(raw[d][1], piece);
                    const __half* x_piece = x_at + in_chunk * 4 * PIECE_HALVES;
#pragma unroll
                    for (int g = 0; g < 2; g++) {
                        u32 lower[8] = {}, upper[8] = {};
                        if (piece < n_pieces) {
                            if (lower_row) lower_source.group(g, lower);
                            if (upper_row) upper_source.group(g, upper);
                        }
                        if (g == 1) load_step(step + STRIP_DEPTH * WARPS_K, raw[d]);
                        multiply_group(lower, upper, x_piece + 16 * g, sums);
                    }
                }
            }
        }
    }
}

// The whole strip: FA is the format of rows 0..7, FB of rows 8..15. True where this warp holds results.
template <class FA, class FB, class XRow>
__device__ __forceinline__ bool strip_product(const u8* lower_row, const u8* upper_row, const __half* x, int width,
                                              XRow x_row, __half* shared, StripSums& sums) {
    static_assert(CHUNK_PIECES / 4 % (WARPS_K * STRIP_DEPTH) == 0, "a chunk is a whole number of rounds");
#pragma unroll
    for (int i = 0; i < TOKEN_TILES * 4; i++) (&sums[0][0])[i] = 0.0f;
    if constexpr (IsSame<FA, FB>::value) {
        strip_pass<FA>(lower_row, upper_row, x, width, x_row, shared, sums);
    } else {
        // The order of K differs between formats: one pass for each.
        strip_pass<FA>(lower_row, nullptr, x, width, x_row, shared, sums);
        __syncthreads();
        strip_pass<FB>(nullptr, upper_row, x, width, x_row, shared, sums);
    }
    if constexpr (WARPS_K == 1) return true;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warp_k = warp / WARPS_N;
    float* at = (float*)shared + (warp % WARPS_N) * TOKEN_TILES * 128 + lane;
    for (int k = 1; k < WARPS_K; k++) {
        __syncthreads();
        if (warp_k == k) {
#pragma unroll
            for (int i = 0; i < TOKEN_TILES * 4; i++) at[i * 32] = (&sums[0][0])[i];
        }
        __syncthreads();
        if (warp_k == 0) {
#pragma unroll
            for (int i = 0; i < TOKEN_TILES * 4; i++) (&sums[0][0])[i] += at[i * 32];
        }
    }
    return warp_k == 0;
}

// Rows of this lane in the block's WARPS_N * 16 rows, and tokens of its sums: sums[j][c] is of row strip_row() + (c & 2) * 4
// and token strip_token(j, c).
__device__ __forceinline__ int strip_warp() { return (threadIdx.x >> 5) % WARPS_N; }
__device__ __forceinline__ int strip_row() { return strip_warp() * 16 + ((threadIdx.x & 31) >> 2); }
__device__ __forceinline__ int strip_token(int j, int c) { return j * 8 + 2 * (threadIdx.x & 3) + (c & 1); }
