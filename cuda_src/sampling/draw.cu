// A token by chance from each row of logits that has filters, after argmax.cu and survey.cu.
//
// draw       top_k, top_p, min_p, then a draw at the temperature, in id order (grid: rows)
//
// The candidates of a row are the tokens within RANGE of the largest logit. Where they hold all that the filters can keep,
// and are at most CANDIDATES, the work is done on their list in shared memory, else on the whole row.
//
// A filter's result is a key (the order-preserving integer of a logit) and how many of the tokens equal to it are kept,
// lowest ids first; the key is found by radix descent over 11 + 11 + 10 bits.

#define THREADS 1024
#define BINS 2048
#define COPIES 4  // of the histogram, by lane: fewer lanes meet in one bin
#include "common/follow.cuh"
#include "sampling/rows.cuh"

struct Cut {
    unsigned key;  // smallest kept key
    u64 equal;     // how many of its tokens are kept, lowest ids first
};

struct Draw {
    u64 sums[32];
    u64 found, target;
    int bin;
};

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

// Values and ids of the candidates, in id order.
struct Candidates {
    float values[CANDIDATES];
    int ids[CANDIDATES];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    draw(const float* logits,      // [R, n_vocab]
         const u64* best,          // [R, parts]: from argmax
         const float* parameters,  // [R, 4]: temperature, top_p, min_p, uniform
         const int* top_k,         // [R]
         const u64* sums,          // [R, parts, 3]: from survey
         const float* values,      // [R, CANDIDATES]: from collect
         const int* value_ids,     // [R, CANDIDATES]
         int* out_ids,             // [R]
         int parts, int n_vocab) {
    follow_predecessor();
    extern __shared__ __align__(16) u64 histogram[];  // [BINS, COPIES], then Candidates
    __shared__ Draw s;
    int row = blockIdx.x;
    Filters filters(parameters + row * 4, top_k[row], n_vocab);
    if (filters.temperature == 0.0f || !filters.any()) return;  // argmax or survey has chosen
    const float* l = logits + (long long)row * n_vocab;
    float largest = logit_of((unsigned)(best[row * parts] >> 32)), top_p = filters.top_p, min_p = filters.min_p;
    auto mass = [&](float v) { return mass_of(v, largest); };
    u64 mine_of[3] = {0, 0, 0};
    if (threadIdx.x < parts)
        for (int i = 0; i < 3; i++) mine_of[i] = sums[(row * parts + threadIdx.x) * 3 + i];
    u64 mass_all = block_sum(mine_of[0], s.sums), mass_in = block_sum(mine_of[1], s.sums);
    int n_candidates = (int)block_sum(mine_of[2], s.sums);
    Candidates& candidates = *(Candidates*)(histogram + BINS * COPIES);
    const int* ids = nullptr;
    int n = n_vocab, k = filters.k;
    bool all_kept_inside = k > 0 ? k <= n_candidates
                           : top_p < 1.0f ? (double)mass_in >= (double)top_p * (double)mass_all
                                          : min_p > 1.01f * expf(-RANGE);
    if (0 < n_candidates && n_candidates <= CANDIDATES && all_kept_inside) {
        for (int i = threadIdx.x; i < n_candidates; i += THREADS) {
            candidates.values[i] = values[row * CANDIDATES + i];
            candidates.ids[i] = value_ids[row * CANDIDATES + i];
        }
        __syncthreads();
        l = candidates.values, ids = candidates.ids, n = n_candidates;
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
            kept = block_sum(sum, s.sums);
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
