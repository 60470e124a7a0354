// One token per row of logits, on the device.
//
// penalise   logits in place: bias; repetition (l > 0: l / p, else l p); minus frequency * count + presence
// argmax     the largest logit of each row, lowest id on ties (grid: parts, rows; the last part of a row folds)
// draw       top_k, top_p, min_p, then a draw at the temperature, in id order (grid: rows)
//
// Masses are integers, exp(l - max) * 2^40, so that sums are exact and have no order. A filter's result is a key (the
// order-preserving integer of a logit) and how many of the tokens equal to it are kept, lowest ids first; the key is found
// by radix descent over 11 + 11 + 10 bits.

#include "common/warp.cuh"

typedef unsigned long long u64;

#define THREADS 1024
#define BINS 2048
#define COPIES 4  // of the histogram, by lane: fewer lanes meet in one bin
#define UNIT 1099511627776.0f  // 2^40

__device__ __forceinline__ unsigned key_of(float l) {
    unsigned bits = __float_as_uint(l);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

extern "C" __global__ void penalise(float* __restrict__ logits,           // [R, n_vocab]
                                    const int* __restrict__ list_start,   // [3, R + 1]: of bias, history, output lists
                                    const int* __restrict__ ids,          // [all lists]
                                    const float* __restrict__ values,     // [all lists]: bias, unused, count
                                    const float* __restrict__ penalties,  // [R, 3]: repetition, frequency, presence
                                    int n_rows, int n_vocab) {
    int row = blockIdx.x;
    float* l = logits + (long long)row * n_vocab;
    const float* p = penalties + row * 3;
    for (int list = 0; list < 3; list++) {
        const int* start = list_start + list * (n_rows + 1) + row;
        for (int i = start[0] + threadIdx.x; i < start[1]; i += blockDim.x) {
            float v = l[ids[i]];
            if (list == 0) v += values[i];
            else if (list == 1) v = v > 0.0f ? v / p[0] : v * p[0];
            else v -= p[1] * values[i] + (values[i] > 0.0f ? p[2] : 0.0f);
            l[ids[i]] = v;
        }
        __syncthreads();
    }
}

// The larger logit; of equal ones, the lower id: as one integer, the key above the inverted id.
__device__ __forceinline__ u64 rank_of(float l, int id) { return ((u64)key_of(l) << 32) | (unsigned)~id; }

__device__ __forceinline__ u64 block_max(u64 v, u64* partial) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) v = max(v, __shfl_xor_sync(FULL_WARP, v, offset));
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = v;
    __syncthreads();
    for (int i = 0; i < (int)blockDim.x / 32; i++) v = max(v, partial[i]);
    __syncthreads();
    return v;
}

extern "C" __global__ void argmax(const float* __restrict__ logits,  // [R, n_vocab]
                                  u64* __restrict__ best,            // [R, parts]
                                  unsigned* __restrict__ arrivals,   // [R], zero before and after
                                  int* __restrict__ out_ids,         // [R]
                                  int n_vocab) {
    __shared__ u64 partial[32];
    __shared__ bool is_last;
    int row = blockIdx.y, parts = gridDim.x;
    const float* l = logits + (long long)row * n_vocab;
    u64 top = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n_vocab; i += parts * blockDim.x) top = max(top, rank_of(l[i], i));
    top = block_max(top, partial);
    if (threadIdx.x == 0) {
        best[row * parts + blockIdx.x] = top;
        __threadfence();
        is_last = atomicInc(arrivals + row, parts - 1) == parts - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    top = 0;
    for (int i = threadIdx.x; i < parts; i += blockDim.x) top = max(top, __ldcg(best + row * parts + i));
    top = block_max(top, partial);
    if (threadIdx.x == 0) {
        out_ids[row] = (int)~(unsigned)top;
        best[row * parts] = top;  // the draw starts from it
    }
}

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

// Radix descent: the largest key such that the weights of the tokens with at least that key, within `within`, reach `target`.
// `before` gets the weight above that key.
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
        for (int i = threadIdx.x; i < n; i += THREADS) {
            unsigned key = key_of(l[i]);
            if ((key & known) != prefix) continue;
            u64 w = weight(key, l[i]);
            if (w) atomicAdd(&histogram[((key >> shift) & digits) * COPIES + (threadIdx.x & (COPIES - 1))], w);
        }
        __syncthreads();
        u64 above;
        int bin = find_bin(histogram, target - before, s, above);
        before += above;
        prefix |= (unsigned)bin << shift;
        known |= digits << shift;
    }
    return prefix;
}

// The id after the last of the `keep` lowest ids whose key is `key`; n_vocab where all are kept.
__device__ __forceinline__ int equal_limit(const float* l, int n, unsigned key, u64 keep, Draw& s) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, segment = (n + 31) / 32;
    int begin = warp * segment, end = min(n, begin + segment);
    u64 count = 0;
    for (int i = begin + lane; i < end; i += 32) count += key_of(l[i]) == key;
    for (int offset = 16; offset > 0; offset >>= 1) count += __shfl_xor_sync(FULL_WARP, count, offset);
    if (lane == 0) s.sums[warp] = count;
    if (threadIdx.x == 0) s.bin = n;
    __syncthreads();
    u64 before = 0;
    for (int i = 0; i < warp; i++) before += s.sums[i];
    if (before < keep && before + count > keep)
        for (int base = begin; base < end; base += 32) {
            int i = base + lane;
            unsigned hit = __ballot_sync(FULL_WARP, i < end && key_of(l[i]) == key);
            u64 until = before + __popc(hit & (2u << lane) - 1u);
            if ((hit >> lane & 1u) && until == keep) s.bin = i + 1;
            before += __popc(hit);
        }
    else if (before == keep && count > 0 && lane == 0)
        atomicMin(&s.bin, begin);  // the keep-th lies in an earlier segment, which it ends
    __syncthreads();
    int limit = s.bin;
    __syncthreads();
    return limit;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    draw(const float* __restrict__ logits,      // [R, n_vocab]
         const u64* __restrict__ best,          // [R, parts]: from argmax
         const float* __restrict__ parameters,  // [R, 4]: temperature, top_p, min_p, uniform
         const int* __restrict__ top_k,         // [R]
         int* __restrict__ out_ids,             // [R]
         int parts, int n_vocab) {
    extern __shared__ __align__(8) u64 histogram[];  // [BINS, COPIES]
    __shared__ Draw s;
    int row = blockIdx.x;
    const float* p = parameters + row * 4;
    float temperature = p[0], top_p = p[1], min_p = p[2], uniform = p[3];
    if (temperature == 0.0f) return;  // argmax has chosen
    const float* l = logits + (long long)row * n_vocab;
    u64 top_rank = best[row * parts];
    float largest = logit_of((unsigned)(top_rank >> 32));
    auto mass = [&](float v) { return (u64)(expf(v - largest) * UNIT); };
    Cut cut{0u, ~0ull};
    int k = top_k[row];
    if (k > 0 && k < n_vocab) {
        u64 above;
        cut.key = descend(l, n_vocab, histogram, (u64)k, s, above, [](unsigned, float) { return (u64)1; });
        cut.equal = (u64)k - above;
    }
    if (top_p < 1.0f) {
        u64 sum = 0;
        for (int i = threadIdx.x; i < n_vocab; i += THREADS)
            if (key_of(l[i]) > cut.key) sum += mass(l[i]);
        u64 kept = block_sum(sum, s);
        if (k > 0 && k < n_vocab) kept += cut.equal * mass(logit_of(cut.key));
        u64 target = (u64)((double)kept * (double)top_p);
        target = target < 1 ? 1 : target;  // at least the likeliest token
        u64 above;
        unsigned key = descend(l, n_vocab, histogram, target, s, above,
                               [&](unsigned key, float v) { return key >= cut.key ? mass(v) : (u64)0; });
        u64 each = mass(logit_of(key)), equal = each ? (target - above + each - 1) / each : 1;
        if (key > cut.key) cut = Cut{key, equal};
        else cut.equal = min(cut.equal, equal);
    }
    int limit = cut.equal == ~0ull ? n_vocab : equal_limit(l, n_vocab, cut.key, cut.equal, s);
    float inverse = 1.0f / temperature;
    // weight of a token in the draw, 0 where a filter dropped it
    auto weight = [&](int i) -> u64 {
        float v = l[i];
        unsigned key = key_of(v);
        if (key < cut.key || (key == cut.key && i >= limit)) return 0;
        if (min_p > 0.0f && v < largest && expf(v - largest) < min_p) return 0;
        // a difference times a huge 1 / temperature may be -inf, whose exponential is 0; 0 * inf is avoided
        return v == largest ? (u64)UNIT : (u64)(expf((v - largest) * inverse) * UNIT);
    };
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, segment = (n_vocab + 31) / 32;
    int begin = warp * segment, end = min(n_vocab, begin + segment);
    u64 sum = 0;
    for (int i = begin + lane; i < end; i += 32) sum += weight(i);
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    if (lane == 0) s.sums[warp] = sum;
    __syncthreads();
    u64 total = 0, before = 0;
    for (int i = 0; i < THREADS / 32; i++) {
        if (i == warp) before = total;
        total += s.sums[i];
    }
    u64 target = min((u64)((double)uniform * (double)total), total - 1);
    if (before <= target && target < before + sum) {
        for (int base = begin; base < end; base += 32) {
            u64 w = base + lane < end ? weight(base + lane) : 0, scan = w;
            for (int offset = 1; offset < 32; offset <<= 1) {
                u64 v = __shfl_up_sync(FULL_WARP, scan, offset);
                if (lane >= offset) scan += v;
            }
            if (target >= before + scan - w && target < before + scan) out_ids[row] = base + lane;
            before += __shfl_sync(FULL_WARP, scan, 31);
        }
    }
}
