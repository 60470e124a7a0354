// A strip of W x on tensor cores: a warp takes 16 weight rows and STRIP_TOKENS tokens, and decodes packed weights in
// registers straight into the fragments that the tensor cores take. For a few to some tens of tokens, where the time goes
// into reading and decoding the weights.
//
//   step s: lane l = 4 g + t holds span 4 s + t (common/span.cuh) of rows g and g + 8; each product takes 4 elements of each
//   of the 4 lanes' spans. K has no order of its own; activations are read in the order of the groups of a span
//
// WARPS_N warps have 16 rows each; WARPS_K warps share rows and take every WARPS_K-th step; their sums are added in order.
// -DSTRIP_STAGED 0: activations come from the first-level cache. 1: CHUNK_PIECES pieces of K at a time go through shared
// memory, [token][span of the chunk][64 halves + 8 of padding] + 32 halves of padding a token; the paddings put the 8
// accesses of 16 bytes that are served together into different banks.
// -DSTRIP_AHEAD 1: a step's bytes are loaded during the step before, the first before ready().
// -DSTRIP_RING n: they come through n slots of shared memory a warp (matmul/ring.cuh), behind the activations.
#pragma once

#include "quants/spans.cuh"

#ifndef STRIP_RING
#define STRIP_RING 0
#endif
#if STRIP_RING
#include "matmul/ring.cuh"
#endif

#define STRIP_THREADS (32 * WARPS_N * WARPS_K)
// Blocks that a multiprocessor must be able to hold: bounds the registers of a thread, see rows.cuh.
#ifndef STRIP_RESIDENT
#define STRIP_RESIDENT (STRIP_TOKENS == 8 ? 768 : 512)
#endif
#define STRIP_BLOCKS (STRIP_RESIDENT < STRIP_THREADS ? 1 : STRIP_RESIDENT / STRIP_THREADS)
#define STEP_PIECES 8
#define SPAN_HALVES 72
#define TOKEN_HALVES (CHUNK_PIECES / 2 * SPAN_HALVES + 32)
#define TOKEN_TILES (STRIP_TOKENS / 8)
static_assert(STRIP_TOKENS % 8 == 0, "whole tiles");
static_assert(!STRIP_STAGED || CHUNK_PIECES % (STEP_PIECES * WARPS_K) == 0, "a chunk is a whole number of rounds");
static_assert(CHUNK_PIECES % 16 == 0, "padding that fits");
static_assert(!STRIP_RING || (STRIP_STAGED && !STRIP_AHEAD && WARPS_K == 1), "what a ring goes with");

typedef float StripSums[TOKEN_TILES][4];

// Rows of this lane in the block's WARPS_N * 16 rows, and tokens of its sums: sums[j][c] is of row strip_row() + (c & 2) * 4
// and token strip_token(j, c).
__device__ __forceinline__ int strip_warp() { return (threadIdx.x >> 5) % WARPS_N; }
__device__ __forceinline__ int strip_row() { return strip_warp() * 16 + ((threadIdx.x & 31) >> 2); }
__device__ __forceinline__ int strip_token(int j, int c) { return j * 8 + 2 * (threadIdx.x & 3) + (c & 1); }

// x_row(i): row of activations of token i of the strip, i < n_tokens. first: first piece of the chunk.
template <class F, class XRow>
__device__ __forceinline__ void copy_x_chunk(const __half* x, int width, int first, XRow x_row, int n_tokens,
                                             __half* shared) {
#if STRIP_RING
    // A warp a token: whose row that is takes a load and a division.
    int lane = threadIdx.x & 31;
    for (int token = threadIdx.x >> 5; token < n_tokens; token += STRIP_THREADS / 32) {
        const __half* row = x + (i64)x_row(token) * width;
#pragma unroll
        for (int i = lane; i < CHUNK_PIECES * 4; i += 32) {
            int span = i / 8, part = i % 8, source = Span<F>::first(first / 2 + span, part / 2) + 8 * (part & 1);
            bool wanted = source < width;
            copy_async16(shared + token * TOKEN_HALVES + span * SPAN_HALVES + part * 8, row + (wanted ? source : 0), wanted);
        }
    }
#else
    for (int i = threadIdx.x; i < n_tokens * CHUNK_PIECES * 4; i += STRIP_THREADS) {
        int token = i / (CHUNK_PIECES * 4), rest = i % (CHUNK_PIECES * 4), span = rest / 8, part = rest % 8;
        int source = Span<F>::first(first / 2 + span, part / 2) + 8 * (part & 1);
        bool wanted = source < width;
        const __half* from = x + (wanted ? (i64)x_row(token) * width + source : 0);
        copy_async16(shared + token * TOKEN_HALVES + span * SPAN_HALVES + part * 8, from, wanted);
    }
#endif
    commit_copies();
}

// One step: sums += the 256 elements' products. x_at(j, i, h): half h of group i of this lane's span, of this lane's token of
// tile j. LOWER, UPPER: which rows are of format F; the others count as zeros. Between, next() loads the next step's bytes.
template <class F, bool LOWER, bool UPPER, class XAt, class Next>
__device__ __forceinline__ void multiply_step(const Span<F> (&bytes)[2], int span, int n_pieces, u32 magic, int n_tokens,
                                              XAt x_at, Next next, StripSums& sums) {
    typename Span<F>::Halves lower_halves(bytes[0], span, n_pieces, magic), upper_halves(bytes[1], span, n_pieces, magic);
    float scales[2] = {lower_halves.scale, upper_halves.scale};
    float min_scales[2] = {lower_halves.min_scale, upper_halves.min_scale};
    StripSums products = {}, minima = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 lower[8] = {}, upper[8] = {};
        if (LOWER) lower_halves.group(i, lower);
        if (UPPER) upper_halves.group(i, upper);
        u32 lower_min = LOWER ? lower_halves.minimum(i) : 0u, upper_min = UPPER ? upper_halves.minimum(i) : 0u;
        if (i == 3) next();
        u32 minimum[4] = {lower_min, upper_min, lower_min, upper_min};
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; j++) {
            if (j == 0 || 8 * j < n_tokens) {
                float(&to)[4] = Span<F>::SCALED ? products[j] : sums[j];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    uint4 v = x_at(j, i, h);
                    u32 a[4] = {lower[4 * h], upper[4 * h], lower[4 * h + 1], upper[4 * h + 1]};
                    multiply_add(to, a, v.x, v.y);
                    u32 b[4] = {lower[4 * h + 2], upper[4 * h + 2], lower[4 * h + 3], upper[4 * h + 3]};
                    multiply_add(to, b, v.z, v.w);
                    if (Span<F>::MINS) {
                        multiply_add(minima[j], minimum, v.x, v.y);
                        multiply_add(minima[j], minimum, v.z, v.w);
                    }
                }
            }
        }
    }
    if (Span<F>::SCALED) {
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; j++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (c < 2 ? !LOWER : !UPPER) continue;
                sums[j][c] = fmaf(scales[c >> 1], products[j][c], sums[j][c]);
                if (Span<F>::MINS) sums[j][c] = fmaf(-min_scales[c >> 1], minima[j][c], sums[j][c]);
            }
        }
    }
}

#if STRIP_RING
// What is in some registers, for products that nobody reads.
__device__ __forceinline__ uint4 any_value() {
    uint4 v;
#if defined(__CUDA_ARCH__)
    asm("" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w));
#endif
    return v;
}

// The same as strip_pass below.
template <class F, bool LOWER, bool UPPER, class XRow, class Ready>
__device__ __forceinline__ void ring_pass(const u8* lower_row, const u8* upper_row, const __half* x, int width, XRow x_row,
                                          int n_tokens, __half* shared, Ready ready, StripSums& sums) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int n_pieces = width / 32, n_steps = (n_pieces + STEP_PIECES - 1) / STEP_PIECES;
    u32 magic = kept_in_register(Span<F>::MAGIC, width);
    WeightRing<F> ring(lower_row, upper_row, n_pieces, (u8*)(shared + STRIP_TOKENS * TOKEN_HALVES));
#pragma unroll
    for (int i = 0; i < STRIP_RING; i++) ring.template ask<LOWER, UPPER>();
    ready();
    const __half* x_lane = shared + g * TOKEN_HALVES + t * SPAN_HALVES;
    for (int first = 0; first < n_steps; first += CHUNK_PIECES / STEP_PIECES) {
        if (first) __syncthreads();
        copy_x_chunk<F>(x, width, first * STEP_PIECES, x_row, n_tokens, shared);
        wait_copies<0>();
        __syncthreads();
        int end = min(n_steps, first + CHUNK_PIECES / STEP_PIECES);
        for (int step = first; step < end; step++) {
            wait_copies<STRIP_RING - 1>();
            __syncwarp();  // all lanes' copies have come
            Span<F> bytes[2];
            if (LOWER) bytes[0].load(ring.row(0), t, n_pieces - step * STEP_PIECES);
            if (UPPER) bytes[1].load(ring.row(1), t, n_pieces - step * STEP_PIECES);
            ring.pass();
            __syncwarp();  // and all have read what is now written over
            ring.template ask<LOWER, UPPER>();
            const __half* x_step = x_lane + (step - first) * 4 * SPAN_HALVES;
            // Lanes whose token there is not do not read: shared memory serves 8 lanes at a time, and is what is short.
            auto x_at = [&](int j, int i, int h) {
                uint4 v = any_value();
                if (j * 8 + g < n_tokens) v = *(const uint4*)(x_step + j * 8 * TOKEN_HALVES + i * 16 + h * 8);
                return v;
            };
            multiply_step<F, LOWER, UPPER>(bytes, step * 4 + t, n_pieces, magic, n_tokens, x_at, [] {}, sums);
        }
    }
}
#else
// Adds the product over all of K. Rows that are not LOWER or UPPER are not read.
template <class F, bool LOWER, bool UPPER, class XRow, class Ready>
__device__ __forceinline__ void strip_pass(const u8* lower_row, const u8* upper_row, const __half* x, int width, XRow x_row,
                                           int n_tokens, __half* shared, Ready ready, StripSums& sums) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp_k = (threadIdx.x >> 5) / WARPS_N;
    int n_pieces = width / 32, n_steps = (n_pieces + STEP_PIECES - 1) / STEP_PIECES;
    u32 magic = kept_in_register(Span<F>::MAGIC, width);
    Span<F> bytes[2];
    auto load_step = [&](int step) {
        if (step < n_steps) {
            if (LOWER) bytes[0].load(lower_row, step * 4 + t, n_pieces);
            if (UPPER) bytes[1].load(upper_row, step * 4 + t, n_pieces);
        }
    };
    if (STRIP_AHEAD) load_step(warp_k);
    ready();
#if STRIP_STAGED
    const __half* x_lane = shared + g * TOKEN_HALVES + t * SPAN_HALVES;
    for (int first = 0; first < n_steps; first += CHUNK_PIECES / STEP_PIECES) {
        if (first) __syncthreads();
        copy_x_chunk<F>(x, width, first * STEP_PIECES, x_row, n_tokens, shared);
        wait_copies<0>();
        __syncthreads();
        int end = min(n_steps, first + CHUNK_PIECES / STEP_PIECES);
        for (int step = first + warp_k; step < end; step += WARPS_K) {
            const __half* x_step = x_lane + (step - first) * 4 * SPAN_HALVES;
            auto x_at = [&](int j, int i, int h) {
                return *(const uint4*)(x_step + j * 8 * TOKEN_HALVES + i * 16 + h * 8);
            };
            if (!STRIP_AHEAD) load_step(step);
            auto next = [&] {
                if (STRIP_AHEAD) load_step(step + WARPS_K);
            };
            multiply_step<F, LOWER, UPPER>(bytes, step * 4 + t, n_pieces, magic, n_tokens, x_at, next, sums);
        }
    }
#else
    const __half* x_rows[TOKEN_TILES];
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) x_rows[j] = x + (i64)x_row(min(j * 8 + g, n_tokens - 1)) * width;
    for (int step = warp_k; step < n_steps; step += WARPS_K) {
        int span = step * 4 + t;
        auto x_at = [&](int j, int i, int h) {
            int at = Span<F>::first(span, i);
            if (F::BLOCK != 256 && at >= width) return make_uint4(0u, 0u, 0u, 0u);
            return *(const uint4*)(x_rows[j] + at + 8 * h);
        };
        if (!STRIP_AHEAD) load_step(step);
        auto next = [&] {
            if (STRIP_AHEAD) load_step(step + WARPS_K);
        };
        multiply_step<F, LOWER, UPPER>(bytes, span, n_pieces, magic, n_tokens, x_at, next, sums);
    }
#endif
}
#endif

// The whole strip: FA is the format of rows 0..7, FB of rows 8..15; both rows can be read. Activations of n_tokens tokens,
// 1 to STRIP_TOKENS; what the other sums hold means nothing. True where this warp holds results. `shared`: the dynamic shared
// memory (size: ops/cuda/matmul.py). ready(): activations and x_row may be read from then on.
template <class FA, class FB, class XRow, class Ready>
__device__ __forceinline__ bool strip_product(const u8* lower_row, const u8* upper_row, const __half* x, int width,
                                              XRow x_row, int n_tokens, __half* shared, Ready ready, StripSums& sums) {
#pragma unroll
    for (int i = 0; i < TOKEN_TILES * 4; i++) (&sums[0][0])[i] = 0.0f;
#if STRIP_RING
    if constexpr (IsSame<FA, FB>::value) {
        ring_pass<FA, true, true>(lower_row, upper_row, x, width, x_row, n_tokens, shared, ready, sums);
    } else {
        // The order of K differs between formats: one pass for each.
        ring_pass<FA, true, false>(lower_row, upper_row, x, width, x_row, n_tokens, shared, ready, sums);
        __syncthreads();
        ring_pass<FB, false, true>(lower_row, upper_row, x, width, x_row, n_tokens, shared, [] {}, sums);
    }
    return true;
#else
    if constexpr (IsSame<FA, FB>::value) {
        strip_pass<FA, true, true>(lower_row, upper_row, x, width, x_row, n_tokens, shared, ready, sums);
    } else {
        // The order of K differs between formats: one pass for each.
        strip_pass<FA, true, false>(lower_row, upper_row, x, width, x_row, n_tokens, shared, ready, sums);
        if (STRIP_STAGED) __syncthreads();
        strip_pass<FB, false, true>(lower_row, upper_row, x, width, x_row, n_tokens, shared, [] {}, sums);
    }
    if constexpr (WARPS_K == 1) return true;
    // partial[k - 1][warp over rows][sum][lane]
    int lane = threadIdx.x & 31, warp_n = strip_warp(), warp_k = (threadIdx.x >> 5) / WARPS_N;
    float* partial = (float*)shared + warp_n * TOKEN_TILES * 128 + lane;
    if (STRIP_STAGED) __syncthreads();
    if (warp_k > 0) {
        float* at = partial + (warp_k - 1) * WARPS_N * TOKEN_TILES * 128;
#pragma unroll
        for (int i = 0; i < TOKEN_TILES * 4; i++) at[i * 32] = (&sums[0][0])[i];
    }
    __syncthreads();
    if (warp_k > 0) return false;
#pragma unroll
    for (int k = 0; k < WARPS_K - 1; k++) {
#pragma unroll
        for (int i = 0; i < TOKEN_TILES * 4; i++) (&sums[0][0])[i] += partial[(k * WARPS_N * TOKEN_TILES * 4 + i) * 32];
    }
    return true;
#endif
}
