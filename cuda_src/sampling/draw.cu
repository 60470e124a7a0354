// A token by chance from each row of logits, after argmax.cu.
//
// draw       top_k, top_p, min_p, then a draw at the temperature, in id order (grid: rows)
//
// A row is read twice to find its candidates, the tokens within RANGE of the largest logit. Where they hold all that the
// filters can keep, and are at most CANDIDATES, the rest works on that list in shared memory, else on the whole row.
//
// Masses are integers, exp(l - max) * 2^40, so that sums are exact and have no order. A filter's result is a key (the
// order-preserving integer of a logit) and how many of the tokens equal to it are kept, lowest ids first; the key is found
// by radix descent over 11 + 11 + 10 bits.

#include "sampling/keys.cuh"

#define THREADS 1024
#define BINS 2048
#define COPIES 4  // of the histogram, by lane: fewer lanes meet in one bin
#define UNIT 1099511627776.0f  // 2^40
#define CANDIDATES 4096
#define RANGE 12.0f
#define AHEAD 8  // logits of a thread under way at once

struct Cut {
    unsigned key;  // smallest kept key
    u64 equal;     // how many of its tokens are kept, lowest ids first
};

struct Draw {
    u64 sums[32];
    u64 found, target;
    int bin;
};

// Sum over the block; every thread gets it.
__device__ __forceinline__ u64 block_sum(u64 v, Draw& s) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(FULL_WARP, v, offset);
    if ((threadIdx.x & 31) == 0) s.sums[threadIdx.x >> 5] = v;
    __syncthreads();
    u64 total = 0;
    for (int i = 0; i < THREADS / 32; i++) total += s.sums[i];
    __syncthreads();
    return total;
}

// The bin, from the highest, in which the running sum reaches `target` (> 0); `before` = the sum above it. The thread's
// two bins are 2 i and 2 i + 1 counted from the top.
__device__ __forceinline__ int find_bin(u64* histogram, u64 target, Draw& s, u64& before) {
    int first = 2 * threadIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u64 mine[2];
    for (int i = 0; i < 2; i++) {
        mine[i] = 0;
        for (int c = 0; c < COPIES; c++) mine[i] += histogram[(BINS - 1 - first - i) * COPIES + c];
    }
    u64 sum = mine[0] + mine[1], scan = sum;
    for (int offset = 1; offset < 32; offset <<= 1) {
        u64 v = __shfl_up_sync(FULL_WARP, scan, offset);
        if (lane >= offset) scan += v;
    }
    if (lane == 31) s.sums[warp] = scan;
    if (threadIdx.x == 0) s.bin = -1;
    __syncthreads();
    u64 above = scan - sum;
    for (int i = 0; i < warp; i++) above += s.sums[i];
    for (int i = 0; i < 2; i++) {
        if (above < target && above + mine[i] >= target) {
            s.bin = BINS - 1 - first - i;
            s.found = above;
        }
        above += mine[i];
    }
    __syncthreads();
    before = s.found;
    int bin = s.bin;
    __syncthreads();
    return bin;
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

// Radix descent: the largest key such that the weights of the tokens with at least that key reach `target`. `before` gets
// the weight above that key.
template <typename Weight>
__device__ __forceinline__ unsigned descend(const float* l, int n, u64* histogram, u64 target, Draw& s, u64& before,
                                            Weight weight) {
    unsigned prefix = 0, known = 0;
    before = 0;
    for (int pass = 0; pass < 3; pass++) {
        int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
        unsigned digits = pass == 2 ? 1023u : 2047u;
        for (int i = threadIdx.x; i < BINS * COPIES; i += THREADS) histogram[i] = 0;
        __syncthreads();
        for_each(l, threadIdx.x, THREADS, n, [&](int, float v) {
            unsigned key = key_of(v);
            u64 w = (key & known) == prefix ? weight(key, v) : (u64)0;
            if (w) atomicAdd(&histogram[((key >> shift) & digits) * COPIES + (threadIdx.x & (COPIES - 1))], w);
        });
        __syncthreads();
        u64 above;
        int bin = find_bin(histogram, target - before, s, above);
        before += above;
        prefix |= (unsigned)bin << shift;
        known |= digits << shift;
    }
    return prefix;
}

__device__ __forceinline__ u64 warp_total(u64 v) {
    for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(FULL_WARP, v, offset);
    return v;
}

// A warp has the ids [begin, end) of a row.
struct Segment {
    int begin, end;
};

__device__ __forceinline__ Segment segment_of(int n) {
    int size = (n + THREADS / 32 - 1) / (THREADS / 32), begin = min(n, (int)(threadIdx.x >> 5) * size);
    return {begin, min(n, begin + size)};
}

// Sum of the warps' values before this warp's, and of all. Every lane of a warp brings the warp's value.
__device__ __forceinline__ u64 sum_before(u64 mine, Draw& s, u64& total) {
    int warp = threadIdx.x >> 5;
    if ((threadIdx.x & 31) == 0) s.sums[warp] = mine;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (int i = 0; i < THREADS / 32; i++) {
        if (i == warp) before = total;
        total += s.sums[i];
    }
    __syncthreads();
    return before;
}

// The id after the last of the `keep` lowest ids whose key is `key`; n where all are kept.
__device__ __forceinline__ int equal_limit(const float* l, int n, unsigned key, u64 keep, Draw& s) {
    int lane = threadIdx.x & 31;
    Segment mine = segment_of(n);
    u64 count = 0, total;
    for_each(l, mine.begin + lane, 32, mine.end, [&](int, float v) { count += key_of(v) == key; });
    count = warp_total(count);
    if (threadIdx.x == 0) s.bin = n;
    u64 before = sum_before(count, s, total);
    if (before < keep && before + count >= keep && total > keep)
        for (int base = mine.begin; base < mine.end; base += 32) {
            int i = base + lane;
            unsigned hit = __ballot_sync(FULL_WARP, i < mine.end && key_of(l[i]) == key);
            u64 until = before + __popc(hit & ((2u << lane) - 1u));
            if ((hit >> lane & 1u) && until == keep) s.bin = i + 1;
            before += __popc(hit);
        }
    __syncthreads();
    int limit = s.bin;
    __syncthreads();
    return limit;
}

// Values and ids of the tokens within RANGE of `largest`, in id order.
struct Candidates {
    float values[CANDIDATES];
    int ids[CANDIDATES];
};

// How many candidates there are (0: the row must be used whole), and the masses of the candidates and of the row.
__device__ __forceinline__ int gather(const float* l, int n, float largest, Candidates& to, Draw& s, u64& mass_in, u64& mass_all) {
    int lane = threadIdx.x & 31;
    Segment mine = segment_of(n);
    u64 count = 0, in = 0, all = 0, total;
    for_each(l, mine.begin + lane, 32, mine.end, [&](int, float v) {
        u64 mass = (u64)(expf(v - largest) * UNIT);
        all += mass;
        if (v >= largest - RANGE) count++, in += mass;
    });
    sum_before(warp_total(in), s, mass_in);
    sum_before(warp_total(all), s, mass_all);
    u64 before = sum_before(warp_total(count), s, total);
    if (total > CANDIDATES) return 0;
    int at = (int)before;
    for (int base = mine.begin; base < mine.end; base += 32 * AHEAD) {
        float v[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) v[j] = base + 32 * j + lane < mine.end ? l[base + 32 * j + lane] : NEGATIVE_INFINITY;
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            bool inside = v[j] >= largest - RANGE;
            unsigned hit = __ballot_sync(FULL_WARP, inside);
            int place = at + __popc(hit & ((1u << lane) - 1u));
            if (inside) to.values[place] = v[j], to.ids[place] = base + 32 * j + lane;
            at += __popc(hit);
        }
    }
    __syncthreads();
    return (int)total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    draw(const float* __restrict__ logits,      // [R, n_vocab]
         const u64* __restrict__ best,          // [R, parts]: from argmax
         const float* __restrict__ parameters,  // [R, 4]: temperature, top_p, min_p, uniform
         const int* __restrict__ top_k,         // [R]
         int* __restrict__ out_ids,             // [R]
         int parts, int n_vocab) {
    extern __shared__ __align__(16) u64 histogram[];  // [BINS, COPIES], then Candidates
    __shared__ Draw s;
    int row = blockIdx.x;
    const float* p = parameters + row * 4;
    float temperature = p[0], top_p = p[1], min_p = p[2], uniform = p[3];
    if (temperature == 0.0f) return;  // argmax has chosen
    const float* l = logits + (long long)row * n_vocab;
    u64 top_rank = best[row * parts];
    float largest = logit_of((unsigned)(top_rank >> 32));
    auto mass = [&](float v) { return (u64)(expf(v - largest) * UNIT); };
    Candidates& candidates = *(Candidates*)(histogram + BINS * COPIES);
    const int* ids = nullptr;
    int n = n_vocab, k = top_k[row] < n_vocab ? top_k[row] : 0;
    u64 mass_all = 0;
    if (k > 0 || top_p < 1.0f || min_p > 0.0f) {
        u64 mass_in;
        int found = gather(l, n_vocab, largest, candidates, s, mass_in, mass_all);
        bool all_kept_inside = k > 0 ? k <= found
                               : top_p < 1.0f ? (double)mass_in >= (double)top_p * (double)mass_all
                                              : min_p > 1.01f * expf(-RANGE);
        if (found > 0 && all_kept_inside) l = candidates.values, ids = candidates.ids, n = found;
    }
    Cut cut{0u, ~0ull};
    if (k > 0 && k < n) {
        u64 above;
        cut.key = descend(l, n, histogram, (u64)k, s, above, [](unsigned, float) { return (u64)1; });
        cut.equal = (u64)k - above;
    }
    if (top_p < 1.0f) {
        u64 kept = mass_all;
        if (k > 0) {
            u64 sum = 0;
            for_each(l, threadIdx.x, THREADS, n, [&](int, float v) {
                if (key_of(v) > cut.key) sum += mass(v);
            });
            kept = block_sum(sum, s);
            if (cut.equal != ~0ull) kept += cut.equal * mass(logit_of(cut.key));
        }
        u64 target = (u64)((double)kept * (double)top_p);
        target = target < 1 ? 1 : target;  // at least the likeliest token
        u64 above;
        unsigned key = descend(l, n, histogram, target, s, above,
                               [&](unsigned key, float v) { return key >= cut.key ? mass(v) : (u64)0; });
        u64 each = mass(logit_of(key)), equal = each ? (target - above + each - 1) / each : 1;
        if (key > cut.key) cut = Cut{key, equal};
        else cut.equal = min(cut.equal, equal);
    }
    int limit = cut.equal == ~0ull ? n : equal_limit(l, n, cut.key, cut.equal, s);
    float inverse = 1.0f / temperature;
    // weight of a token in the draw, 0 where a filter dropped it
    auto weight = [&](int i, float v) -> u64 {
        unsigned key = key_of(v);
        if (key < cut.key || (key == cut.key && i >= limit)) return 0;
        if (min_p > 0.0f && v < largest && expf(v - largest) < min_p) return 0;
        // 0 times an infinite 1 / temperature is avoided; a difference times it may be -inf, whose exponential is 0
        return v == largest ? (u64)UNIT : (u64)(expf((v - largest) * inverse) * UNIT);
    };
    int lane = threadIdx.x & 31;
    Segment mine = segment_of(n);
    u64 sum = 0, total;
    for_each(l, mine.begin + lane, 32, mine.end, [&](int i, float v) { sum += weight(i, v); });
    sum = warp_total(sum);
    u64 before = sum_before(sum, s, total);
    u64 target = min((u64)((double)uniform * (double)total), total - 1);
    if (before > target || target >= before + sum) return;
    // The warp whose segment has the target: blocks of 32 AHEAD ids, then 32 ids.
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
            if (target >= before + scan - w && target < before + scan) out_ids[row] = ids ? ids[base + lane] : base + lane;
            before += __shfl_sync(FULL_WARP, scan, 31);
        }
        return;
    }
}
