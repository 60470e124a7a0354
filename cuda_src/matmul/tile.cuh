// One tile of W x on tensor cores: TILE_N weight rows times TILE_M tokens, 256 threads.
//
// Packed weights go from global memory to registers (RAW_DEPTH stages ahead), are decoded to halves and stored in shared
// memory, twice buffered; activations (halves, one scale a row) arrive by cp.async, X_STAGES buffered. A stage is
// TILE_K = 8192 / TILE_N elements of K, so each thread decodes one piece of one row a stage. K is taken in the order of
// the format's pieces, for weights and activations alike.
//
//          K ->                       WARPS_N x WARPS_M x WARPS_K warps; warps of different k index share a tile of the
//   W  [TILE_N][TILE_K + 8] halves    output and take every WARPS_K-th 16 elements of K; their sums are added in order
//   X  [TILE_M][TILE_K + 8] halves    at the end. The padding of 16 bytes keeps ldmatrix free of bank conflicts.
//
// Two formats may alternate in bands of 8 rows (gate rows, up rows); then two passes over K are made, each with zeros for
// the rows of the other format, since the order of K differs between formats.
#pragma once

#include "common/mma.cuh"
#include "quants/all.cuh"

#if TILE_N == 128
#define TILE_K 64
#define WARPS_N 4
#define WARPS_M 2
#define WARPS_K 1
#define RAW_DEPTH 1
#else
#define TILE_K 256
#define WARPS_N 2
#define WARPS_M 1
#define WARPS_K 4
#define RAW_DEPTH 2
#endif
#ifndef X_STAGES
#define X_STAGES (TILE_N == 128 ? 3 : 2)
#endif

#define TILE_THREADS 256
#define ROW_HALVES (TILE_K + 8)
#define STAGE_PIECES (TILE_K / 32)
#define W_TILE_HALVES (TILE_N * ROW_HALVES)
#define X_TILE_HALVES (TILE_M * ROW_HALVES)
// Dynamic shared memory of a tile; ops/cuda/matmul.py computes the same number.
#define TILE_SHARED_BYTES (2 * (2 * W_TILE_HALVES + X_STAGES * X_TILE_HALVES))
#define FRAGMENTS_N (TILE_N / WARPS_N / 16)
#define FRAGMENTS_M (TILE_M / WARPS_M / 8)
#define X_COPIES (TILE_M * TILE_K / 8 / TILE_THREADS)
static_assert(TILE_N * TILE_K == 32 * TILE_THREADS, "a thread decodes one piece a stage");
static_assert(X_COPIES >= 1 && FRAGMENTS_M % 2 == 0, "TILE_M is too small");

typedef float TileSums[FRAGMENTS_N][FRAGMENTS_M][4];

// What the tile reads. Row pointers of this thread: the weight row that it decodes (null = zeros), and the activation
// rows that it copies (row -1 = zeros).
struct TileInput {
    const u8* weight_row;
    const __half* x;  // [.., width]
    int x_rows[X_COPIES];
    int width;
};

// Weight row (0 .. TILE_N - 1) that this thread decodes, and activation row of its i-th copy.
__device__ __forceinline__ int tile_weight_row() { return threadIdx.x / STAGE_PIECES; }
__device__ __forceinline__ int tile_x_row(int i) {
    return threadIdx.x / (TILE_K / 8) + i * (TILE_THREADS / (TILE_K / 8));
}

template <class F>
__device__ __forceinline__ void copy_x_stage(const TileInput& in, int stage, __half* x_tile) {
    int column = threadIdx.x % (TILE_K / 8);  // in 8 halves: piece of the stage, group, half of the group
    int piece = stage * STAGE_PIECES + column / 4;
    int source = F::group(piece, (column / 2) & 1) + 8 * (column & 1);
    bool inside = piece * 32 < in.width;
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) {
        bool wanted = inside && in.x_rows[i] >= 0;
        const __half* from = in.x + (wanted ? (i64)in.x_rows[i] * in.width + source : 0);
        copy_async16(x_tile + tile_x_row(i) * ROW_HALVES + 8 * column, from, wanted);
    }
}

template <class F>
__device__ __forceinline__ void store_w_piece(const typename F::Raw& raw, int piece, bool wanted, __half* w_tile) {
    uint4* to = (uint4*)(w_tile + tile_weight_row() * ROW_HALVES + (threadIdx.x % STAGE_PIECES) * 32);
    if (!wanted) {
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = make_uint4(0, 0, 0, 0);
        return;
    }
    typename SourceOf<F>::type source(raw, piece);
#pragma unroll
    for (int g = 0; g < 2; g++) {
        u32 halves[8];
        source.group(g, halves);
        to[2 * g] = make_uint4(halves[0], halves[1], halves[2], halves[3]);
        to[2 * g + 1] = make_uint4(halves[4], halves[5], halves[6], halves[7]);
    }
}

__device__ __forceinline__ void multiply_stage(const __half* w_tile, const __half* x_tile, TileSums& sums) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int warp_n = warp % WARPS_N, warp_m = warp / WARPS_N % WARPS_M, warp_k = warp / (WARPS_N * WARPS_M);
    const __half* w_at = w_tile + (warp_n * FRAGMENTS_N * 16 + (lane & 15)) * ROW_HALVES + (lane >> 4) * 8;
    const __half* x_at =
        x_tile + (warp_m * FRAGMENTS_M * 8 + (lane >> 4) * 8 + (lane & 7)) * ROW_HALVES + ((lane >> 3) & 1) * 8;
#pragma unroll
    for (int k = 0; k < TILE_K / 16; k += WARPS_K) {
        int column = (k + warp_k) * 16;
        u32 a[FRAGMENTS_N][4];
#pragma unroll
        for (int i = 0; i < FRAGMENTS_N; i++) load_matrices(a[i], w_at + i * 16 * ROW_HALVES + column);
#pragma unroll
        for (int j = 0; j < FRAGMENTS_M; j += 2) {
            u32 b[4];
            load_matrices(b, x_at + j * 8 * ROW_HALVES + column);
#pragma unroll
            for (int i = 0; i < FRAGMENTS_N; i++) {
                multiply_add(sums[i][j], a[i], b[0], b[1]);
                multiply_add(sums[i][j + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// Adds the product over all of K. `mine`: this thread's weight row is of format F; other rows count as zeros.
template <class F>
__device__ __forceinline__ void tile_pass(const TileInput& in, bool mine, __half* shared, TileSums& sums) {
    __half* w_tiles = shared;
    __half* x_tiles = shared + 2 * W_TILE_HALVES;
    int n_pieces = in.width / 32, n_stages = (n_pieces + STAGE_PIECES - 1) / STAGE_PIECES;
    int my_piece = threadIdx.x % STAGE_PIECES;
    const u8* row = mine ? in.weight_row : nullptr;
    typename F::Raw raw[RAW_DEPTH];
    auto load_raw = [&](int stage, typename F::Raw& r) {
        int piece = stage * STAGE_PIECES + my_piece;
        if (row && piece < n_pieces) F::load(row, piece, r);
    };
    auto store_w = [&](int stage, const typename F::Raw& r) {
        int piece = stage * STAGE_PIECES + my_piece;
        store_w_piece<F>(r, piece, row && piece < n_pieces, w_tiles + (stage & 1) * W_TILE_HALVES);
    };
#pragma unroll
    for (int d = 0; d < RAW_DEPTH; d++) load_raw(d, raw[d]);
#pragma unroll
    for (int s = 0; s < X_STAGES - 1; s++) {
        if (s < n_stages) copy_x_stage<F>(in, s, x_tiles + s * X_TILE_HALVES);
        commit_copies();
    }
    store_w(0, raw[0]);
    load_raw(RAW_DEPTH, raw[0]);
    int x_buffer = 0;
    for (int first = 0; first < n_stages; first += RAW_DEPTH) {
#pragma unroll
        for (int d = 0; d < RAW_DEPTH; d++) {
            int stage = first + d;
            if (stage < n_stages) {
                wait_copies<X_STAGES - 2>();
                __syncthreads();
                int ahead = stage + X_STAGES - 1, ahead_buffer = x_buffer == 0 ? X_STAGES - 1 : x_buffer - 1;
                if (ahead < n_stages) copy_x_stage<F>(in, ahead, x_tiles + ahead_buffer * X_TILE_HALVES);
                commit_copies();
                multiply_stage(w_tiles + (stage & 1) * W_TILE_HALVES, x_tiles + x_buffer * X_TILE_HALVES, sums);
                x_buffer = x_buffer + 1 == X_STAGES ? 0 : x_buffer + 1;
                if (stage + 1 < n_stages) {
                    store_w(stage + 1, raw[(d + 1) % RAW_DEPTH]);
                    load_raw(stage + 1 + RAW_DEPTH, raw[(d + 1) % RAW_DEPTH]);
                }
            }
        }
    }
    wait_copies<0>();
    __syncthreads();
}

// Sums of warps that share an output tile, added in the order of their k index; the warps of k index 0 hold the result.
__device__ __forceinline__ bool add_over_k(float* shared, TileSums& sums) {
#if WARPS_K > 1
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int tile = warp % (WARPS_N * WARPS_M), warp_k = warp / (WARPS_N * WARPS_M);
    constexpr int PER_LANE = FRAGMENTS_N * FRAGMENTS_M * 4;
    for (int k = 1; k < WARPS_K; k++) {
        float* at = shared + (tile * PER_LANE) * 32 + lane;
        if (warp_k == k) {
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) at[i * 32] = (&sums[0][0][0])[i];
        }
        __syncthreads();
        if (warp_k == 0) {
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) (&sums[0][0][0])[i] += at[i * 32];
        }
        __syncthreads();
    }
    return warp_k == 0;
#else
    return true;
#endif
}

// The whole tile; true where this thread holds results. FA: format of rows 0..7 of each 16, FB: of rows 8..15.
template <class FA, class FB>
__device__ __forceinline__ bool tile_product(const TileInput& in, __half* shared, TileSums& sums) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS_N * FRAGMENTS_M * 4; i++) (&sums[0][0][0])[i] = 0.0f;
    if constexpr (IsSame<FA, FB>::value) {
        tile_pass<FA>(in, true, shared, sums);
    } else {
        bool upper = tile_weight_row() & 8;
        tile_pass<FA>(in, !upper, shared, sums);
        tile_pass<FB>(in, upper, shared, sums);
    }
    return add_over_k((float*)shared, sums);
}

// Place of sums[i][j][c] in the tile.
__device__ __forceinline__ int sum_row(int i, int c) {
    int lane = threadIdx.x & 31, warp_n = (threadIdx.x >> 5) % WARPS_N;
    return (warp_n * FRAGMENTS_N + i) * 16 + (lane >> 2) + (c & 2) * 4;
}
__device__ __forceinline__ int sum_token(int j, int c) {
    int lane = threadIdx.x & 31, warp_m = (threadIdx.x >> 5) / WARPS_N % WARPS_M;
    return (warp_m * FRAGMENTS_M + j) * 8 + (lane & 3) * 2 + (c & 1);
}
