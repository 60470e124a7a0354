// A block's work on a row of logits, or on a part of one: masses as integers, sums over the block, walking by id.
// THREADS: of the block; defined by whoever includes this.
//
// Masses are exp(l - max) * 2^40 as integers, so that their sums are exact and have no order.
#pragma once
#include "sampling/keys.cuh"

#define WARPS (THREADS / 32)
#define UNIT 1099511627776.0f  // 2^40
#define CANDIDATES 16384       // that are drawn from as a list
#define NEAR_BINS 128          // of logits near the largest, each NEAR_WIDTH wide
#define NEAR_WIDTH 0.125f
#define AHEAD 8                // logits of a thread under way at once

// A row's parameters.
struct Filters {
    float temperature, top_p, min_p, uniform;
    int k;  // 0: off

    __device__ __forceinline__ Filters(const float* p, int top_k, int n_vocab)
        : temperature(p[0]), top_p(p[1]), min_p(p[2]), uniform(p[3]), k(top_k < n_vocab ? top_k : 0) {}
    __device__ __forceinline__ bool any() const { return k > 0 || top_p < 1.0f || min_p > 0.0f; }
};

// The bin of a logit, NEAR_BINS or more where it is not near. Larger logits have lower bins, or the same.
__device__ __forceinline__ int near_bin(float l, float largest) {
    return (int)fminf((largest - l) * (1.0f / NEAR_WIDTH), (float)NEAR_BINS);
}

// What the survey leaves of a row with filters: the candidates are the logits of bins 0 .. last, all that the filters can
// keep. There is no list of them where last < 0 or they are more than CANDIDATES.
struct Surveyed {
    u64 mass;  // of the whole row
    int last, n;
    __device__ __forceinline__ bool has_list() const { return last >= 0 && n <= CANDIDATES; }
};

__device__ __forceinline__ u64 mass_of(float l, float largest) { return (u64)(expf(l - largest) * UNIT); }

// 0 times an infinite 1 / temperature is avoided; a difference times it may be -inf, whose exponential is 0.
__device__ __forceinline__ u64 weight_of(float l, float largest, float inverse_temperature) {
    return l == largest ? (u64)UNIT : (u64)(expf((l - largest) * inverse_temperature) * UNIT);
}

// The number drawn among `total`.
__device__ __forceinline__ u64 target_of(float uniform, u64 total) {
    return min((u64)((double)uniform * (double)total), total - 1);
}

// Ids [begin, end).
struct Segment {
    int begin, end;
};

// Piece `i` of a segment that is cut in `n` of equal size.
__device__ __forceinline__ Segment piece_of(Segment whole, int i, int n) {
    int size = (whole.end - whole.begin + n - 1) / n, begin = min(whole.end, whole.begin + i * size);
    return {begin, min(whole.end, begin + size)};
}

__device__ __forceinline__ u64 warp_total(u64 v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(FULL_WARP, v, offset);
    return v;
}

// Sum of the warps' values before this warp's, and of all. Every lane of a warp brings the warp's value.
__device__ __forceinline__ u64 sum_before(u64 mine, u64* sums, u64& total) {  // sums: shared, [WARPS]
    int warp = threadIdx.x >> 5;
    if ((threadIdx.x & 31) == 0) sums[warp] = mine;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (int i = 0; i < WARPS; i++) {
        if (i == warp) before = total;
        total += sums[i];
    }
    __syncthreads();
    return before;
}

// Sum over the block; every thread gets it.
__device__ __forceinline__ u64 block_sum(u64 v, u64* sums) {
    u64 total;
    sum_before(warp_total(v), sums, total);
    return total;
}

// f(i, l[i]) for i = first, first + step, ... below end, with AHEAD loads under way.
template <typename F>
__device__ __forceinline__ void for_each(const float* l, int first, int step, int end, F f) {
    for (int base = first; base < end; base += AHEAD * step) {
        float v[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) v[j] = base + j * step < end ? l[base + j * step] : 0.0f;
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (base + j * step < end) f(base + j * step, v[j]);
    }
}

// A warp's walk over `mine` in id order: found(i) for the id at which the running sum of weight(i, l[i]), `before` at the
// start, exceeds `target`. It is known to lie there. Blocks of 32 AHEAD ids first, then 32 ids at a time.
template <typename Weight, typename Found>
__device__ __forceinline__ void walk(const float* l, Segment mine, u64 before, u64 target, Weight weight, Found found) {
    int lane = threadIdx.x & 31;
    for (int block = mine.begin; block < mine.end; block += 32 * AHEAD) {
        int end = min(mine.end, block + 32 * AHEAD);
        u64 part = 0;
        for_each(l, block + lane, 32, end, [&](int i, float v) { part += weight(i, v); });
        part = warp_total(part);
        if (before + part <= target) {
            before += part;
            continue;
        }
        for (int base = block; base < end; base += 32) {
            u64 w = base + lane < end ? weight(base + lane, l[base + lane]) : 0, scan = w;
            for (int offset = 1; offset < 32; offset <<= 1) {
                u64 v = __shfl_up_sync(FULL_WARP, scan, offset);
                if (lane >= offset) scan += v;
            }
            if (target >= before + scan - w && target < before + scan) found(base + lane);
            before += __shfl_sync(FULL_WARP, scan, 31);
        }
        return;
    }
}
