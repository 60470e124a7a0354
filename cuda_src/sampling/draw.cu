// A token by chance from each row of logits that has filters, after argmax.cu and survey.cu.
//
// draw       top_k, top_p, min_p, then a draw at the temperature, in id order (grid: rows)
//
// Where the candidates that survey.cu found fit in a list the work is done on it, in shared memory, else on the whole row.
//
// A filter's result is a key (the order-preserving integer of a logit) and how many of the tokens equal to it are kept,
// lowest ids first. It is looked for among bins by the distance from the largest logit, which spread what keys would
// crowd; then each of the bin's tokens is compared with the others, or, where there are many, keys are descended by 11 +
// 11 + 10 bits.

#define THREADS 1024
#define BINS 2048
#define MEMBERS 512  // of a bin that are compared one with another
#include "common/follow.cuh"
#include "sampling/rows.cuh"

struct Cut {
    unsigned key;  // smallest kept key
    u64 equal;     // how many of its tokens are kept, lowest ids first
};

struct Draw {
    u64 sums[32];
    u64 found, target;
    int bin, n_members;
    unsigned key, keys[MEMBERS];
    u64 weights[MEMBERS];
};

// The bin, from the highest, in which the running sum reaches `target` (> 0); `before` = the sum above it. The thread's
// two bins are 2 i and 2 i + 1 counted from the top.
__device__ __forceinline__ int find_bin(u64* histogram, u64 target, Draw& s, u64& before) {
    int first = 2 * threadIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u64 mine[2];
    for (int i = 0; i < 2; i++) mine[i] = histogram[BINS - 1 - first - i];
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

// Radix descent: the largest key such that the weights of the tokens with at least that key, and `before`, reach `target`.
// `before` becomes the weight above that key.
template <typename Weight>
__device__ __forceinline__ unsigned descend_keys(const float* l, int n, u64* histogram, u64 target, Draw& s, u64& before,
                                                 Weight weight) {
    unsigned prefix = 0, known = 0;
    for (int pass = 0; pass < 3; pass++) {
        int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
        unsigned digits = pass == 2 ? 1023u : 2047u;
        for (int i = threadIdx.x; i < BINS; i += THREADS) histogram[i] = 0;
        __syncthreads();
        for_each(l, threadIdx.x, THREADS, n, [&](int, float v) {
            unsigned key = key_of(v);
            u64 w = (key & known) == prefix ? weight(key, v) : (u64)0;
            if (w) atomicAdd(&histogram[(key >> shift) & digits], w);
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

// The largest key such that the weights of the tokens with at least that key reach `target`. `before` gets the weight above
// that key.
template <typename Weight>
__device__ __forceinline__ unsigned descend(const float* l, int n, float largest, u64* histogram, u64 target, Draw& s, u64& before,
                                            Weight weight) {
    // Bins of 1 / 128, counted down from the largest logit; the last of them, bin 0, has all below 16 less.
    auto bin_of = [&](float v) { return BINS - 1 - (int)fminf((largest - v) * 128.0f, (float)(BINS - 1)); };
    for (int i = threadIdx.x; i < BINS; i += THREADS) histogram[i] = 0;
    if (threadIdx.x == 0) s.n_members = 0;
    __syncthreads();
    u64 far = 0;
    for_each(l, threadIdx.x, THREADS, n, [&](int, float v) {
        u64 w = weight(key_of(v), v);
        int bin = bin_of(v);
        if (bin == 0) far += w;
        else if (w) atomicAdd(&histogram[bin], w);
    });
    far = block_sum(far, s.sums);
    if (threadIdx.x == 0) histogram[0] = far;
    __syncthreads();
    int bin = find_bin(histogram, target, s, before);
    for_each(l, threadIdx.x, THREADS, n, [&](int, float v) {
        unsigned key = key_of(v);
        u64 w = bin_of(v) == bin ? weight(key, v) : (u64)0;
        if (w) {
            int at = atomicAdd(&s.n_members, 1);
            if (at < MEMBERS) s.keys[at] = key, s.weights[at] = w;
        }
    });
    __syncthreads();
    int n_members = s.n_members;
    if (n_members > MEMBERS)
        return descend_keys(l, n, histogram, target, s, before,
                            [&](unsigned key, float v) { return bin_of(v) == bin ? weight(key, v) : (u64)0; });
    if (threadIdx.x < n_members) {
        unsigned key = s.keys[threadIdx.x];
        u64 above = before, equal = 0;
        for (int i = 0; i < n_members; i++) {
            if (s.keys[i] > key) above += s.weights[i];
            if (s.keys[i] == key) equal += s.weights[i];
        }
        if (above < target && above + equal >= target) s.key = key, s.found = above;
    }
    __syncthreads();
    before = s.found;
    unsigned key = s.key;
    __syncthreads();
    return key;
}

// The id after the last of the `keep` lowest ids whose key is `key`; n where all are kept.
__device__ __forceinline__ int equal_limit(const float* l, int n, unsigned key, u64 keep, Draw& s) {
    int lane = threadIdx.x & 31;
    Segment mine = piece_of({0, n}, threadIdx.x >> 5, WARPS);
    u64 count = 0, total;
    for_each(l, mine.begin + lane, 32, mine.end, [&](int, float v) { count += key_of(v) == key; });
    count = warp_total(count);
    if (threadIdx.x == 0) s.bin = n;
    u64 before = sum_before(count, s.sums, total);
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

extern "C" __global__ void __launch_bounds__(THREADS)
    draw(const float* logits,      // [R, n_vocab]
         const u64* best,          // [R, parts]: from argmax
         const float* parameters,  // [R, 4]: temperature, top_p, min_p, uniform
         const int* top_k,         // [R]
         const Surveyed* surveyed, // [R]: from survey
         const float* values,      // [R, CANDIDATES]: from collect
         const int* value_ids,     // [R, CANDIDATES]
         int* out_ids,             // [R]
         int parts, int n_vocab) {
    follow_predecessor();
    extern __shared__ __align__(16) u64 histogram[];  // [BINS], then the values of the candidates
    __shared__ __align__(16) Draw s;
    int row = blockIdx.x;
    Filters filters(parameters + row * 4, top_k[row], n_vocab);
    if (filters.temperature == 0.0f || !filters.any()) return;  // argmax or survey has chosen
    const float* l = logits + (long long)row * n_vocab;
    float largest = logit_of((unsigned)(best[row * parts] >> 32)), top_p = filters.top_p, min_p = filters.min_p;
    auto mass = [&](float v) { return mass_of(v, largest); };
    Surveyed found = surveyed[row];
    u64 mass_all = found.mass;
    const int* ids = nullptr;
    int n = n_vocab, k = filters.k;
    if (found.has_list()) {
        float* candidates = (float*)(histogram + BINS);
        for (int i = threadIdx.x; i < found.n; i += THREADS) candidates[i] = values[row * CANDIDATES + i];
        __syncthreads();
        l = candidates, ids = value_ids + row * CANDIDATES, n = found.n;
    }
    Cut cut{0u, ~0ull};
    if (k > 0 && k < n) {
        u64 above;
        cut.key = descend(l, n, largest, histogram, (u64)k, s, above, [](unsigned, float) { return (u64)1; });
        cut.equal = (u64)k - above;
    }
    if (top_p < 1.0f) {
        u64 kept = mass_all;
        if (k > 0) {
            u64 sum = 0;
            for_each(l, threadIdx.x, THREADS, n, [&](int, float v) {
                if (key_of(v) > cut.key) sum += mass(v);
            });
            kept = block_sum(sum, s.sums);
            if (cut.equal != ~0ull) kept += cut.equal * mass(logit_of(cut.key));
        }
        u64 target = (u64)((double)kept * (double)top_p);
        target = target < 1 ? 1 : target;  // at least the likeliest token
        u64 above;
        unsigned key = descend(l, n, largest, histogram, target, s, above,
                               [&](unsigned key, float v) { return key >= cut.key ? mass(v) : (u64)0; });
        u64 each = mass(logit_of(key)), equal = each ? (target - above + each - 1) / each : 1;
        if (key > cut.key) cut = Cut{key, equal};
        else cut.equal = min(cut.equal, equal);
    }
    int limit = cut.equal == ~0ull ? n : equal_limit(l, n, cut.key, cut.equal, s);
    float inverse = 1.0f / filters.temperature;
    // weight of a token in the draw, 0 where a filter dropped it
    auto weight = [&](int i, float v) -> u64 {
        unsigned key = key_of(v);
        if (key < cut.key || (key == cut.key && i >= limit)) return 0;
        if (min_p > 0.0f && v < largest && expf(v - largest) < min_p) return 0;
        return weight_of(v, largest, inverse);
    };
    Segment mine = piece_of({0, n}, threadIdx.x >> 5, WARPS);
    u64 sum = 0, total;
    for_each(l, mine.begin + (threadIdx.x & 31), 32, mine.end, [&](int i, float v) { sum += weight(i, v); });
    sum = warp_total(sum);
    u64 before = sum_before(sum, s.sums, total);
    u64 target = target_of(filters.uniform, total);
    if (before <= target && target < before + sum)
        walk(l, mine, before, target, weight, [&](int i) { out_ids[row] = ids ? ids[i] : i; });
}
