// The reading of the logits for draws, by many blocks a row (after argmax.cu).
//
// survey     a row without filters: sums of exp((l - max) / temperature) per part; the last part picks the part in which
//            the drawn number lies, in id order, and walks through that one. A row with filters: masses and numbers of the
//            logits by their distance from the largest; the last part finds the distance beyond which no filter keeps any
//            (grid: parts, rows)
// collect    the candidates of the rows with filters, in id order, where they are few enough (grid: parts, rows)
//
// Bytes moved: each reads the logits once; collect only the parts that have candidates.

#define THREADS 256
#define MAX_PARTS 64
#include "common/arrive.cuh"
#include "common/follow.cuh"
#include "sampling/rows.cuh"

struct Bins {
    u64 mass[NEAR_BINS];
    int count[NEAR_BINS];
    int last;
};

// A part's masses onto those of the row, and its numbers of logits in bins 0 .. i for each i.
__device__ __forceinline__ void leave_bins(const Bins& s, u64* bins, int* counts, u64 all) {
    int i = threadIdx.x;
    if (i < NEAR_BINS) {
        int until = 0;
        for (int b = 0; b <= i; b++) until += s.count[b];
        counts[i] = until;
        if (s.mass[i]) atomicAdd(bins + i, s.mass[i]);
    }
    if (i == NEAR_BINS) atomicAdd(bins + NEAR_BINS, all);
}

// The first bin up to which lies all that the filters can keep. The bins of the row are zero afterwards.
__device__ __forceinline__ void choose_bins(Bins& s, const Filters& filters, u64* bins, Surveyed* surveyed, const int* counts,
                                            int parts) {
    int i = threadIdx.x, n = 0;
    u64 all = __ldcg(bins + NEAR_BINS);
    if (i < NEAR_BINS) {
        for (int part = 0; part < parts; part++) n += __ldcg(counts + part * NEAR_BINS + i);
        s.mass[i] = __ldcg(bins + i), s.count[i] = n;
    }
    if (i == 0) s.last = NEAR_BINS;
    __syncthreads();
    if (i < NEAR_BINS) {
        u64 mass = 0;
        for (int b = 0; b <= i; b++) mass += s.mass[b];
        // top_p counts what top_k kept, and min_p comes after both: the first of them that is there decides.
        bool all_inside = filters.k > 0        ? n >= filters.k
                          : filters.top_p < 1.0f ? (double)mass >= (double)filters.top_p * (double)all
                                                 : filters.min_p > 1.01f * expf(-NEAR_WIDTH * i);
        if (all_inside) atomicMin(&s.last, i);
        bins[i] = 0;
    }
    __syncthreads();
    if (i == 0) {
        int last = s.last < NEAR_BINS ? s.last : -1;
        *surveyed = Surveyed{all, last, last < 0 ? 0 : s.count[last]};
        bins[NEAR_BINS] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    survey(const float* logits,      // [R, n_vocab]
           const u64* best,          // [R, parts]: from argmax
           const float* parameters,  // [R, 4]: temperature, top_p, min_p, uniform
           const int* top_k,         // [R]
           u64* sums,                // [R, parts]: masses of rows without filters
           u64* bins,                // [R, NEAR_BINS + 1]: masses of bins and of the row; zero before and after
           int* counts,              // [R, parts, NEAR_BINS]: logits in bins 0 .. of a part
           Surveyed* surveyed,       // [R]
           unsigned* arrivals,       // [R], zero before and after
           int* out_ids,             // [R]
           int n_vocab) {
    follow_predecessor();
    __shared__ __align__(16) u64 warps[WARPS], of_parts[MAX_PARTS];
    __shared__ __align__(16) Bins s;
    __shared__ int is_last;
    int part = blockIdx.x, row = blockIdx.y, parts = gridDim.x;
    Filters filters(parameters + row * 4, top_k[row], n_vocab);
    if (filters.temperature == 0.0f) return;  // argmax has chosen
    const float* l = logits + (long long)row * n_vocab;
    float largest = logit_of((unsigned)(best[row * parts] >> 32));
    Segment mine = piece_of({0, n_vocab}, part, parts);
    if (filters.any()) {
        if (threadIdx.x < NEAR_BINS) s.mass[threadIdx.x] = 0, s.count[threadIdx.x] = 0;
        __syncthreads();
        u64 all = 0;
        for_each(l, mine.begin + threadIdx.x, THREADS, mine.end, [&](int, float v) {
            u64 mass = mass_of(v, largest);
            int bin = near_bin(v, largest);
            all += mass;
            if (bin < NEAR_BINS) atomicAdd(&s.count[bin], 1), atomicAdd(&s.mass[bin], mass);
        });
        all = block_sum(all, warps);
        u64* row_bins = bins + row * (NEAR_BINS + 1);
        int* row_counts = counts + row * parts * NEAR_BINS;
        leave_bins(s, row_bins, row_counts + part * NEAR_BINS, all);
        if (arrives_last(arrivals + row, parts, &is_last)) choose_bins(s, filters, row_bins, surveyed + row, row_counts, parts);
        return;
    }
    float inverse = 1.0f / filters.temperature;
    auto weight = [&](int, float v) { return weight_of(v, largest, inverse); };
    u64 sum = 0;
    for_each(l, mine.begin + threadIdx.x, THREADS, mine.end, [&](int i, float v) { sum += weight(i, v); });
    sum = block_sum(sum, warps);
    if (threadIdx.x == 0) sums[row * parts + part] = sum;
    if (!arrives_last(arrivals + row, parts, &is_last)) return;
    if (threadIdx.x < parts) of_parts[threadIdx.x] = __ldcg(sums + row * parts + threadIdx.x);
    __syncthreads();
    u64 total = 0, before = 0;
    for (int i = 0; i < parts; i++) total += of_parts[i];
    u64 target = target_of(filters.uniform, total);
    for (part = 0; part < parts - 1 && before + of_parts[part] <= target; part++) before += of_parts[part];
    Segment chosen = piece_of(piece_of({0, n_vocab}, part, parts), threadIdx.x >> 5, WARPS);
    sum = 0;
    for_each(l, chosen.begin + (threadIdx.x & 31), 32, chosen.end, [&](int i, float v) { sum += weight(i, v); });
    sum = warp_total(sum);
    u64 whole;
    before += sum_before(sum, warps, whole);
    if (before <= target && target < before + sum)
        walk(l, chosen, before, target, weight, [&](int i) { out_ids[row] = i; });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    collect(const float* logits,      // [R, n_vocab]
            const u64* best,          // [R, parts]: from argmax
            const float* parameters,  // [R, 4]
            const int* top_k,         // [R]
            const int* counts,        // [R, parts, NEAR_BINS]: from survey
            const Surveyed* surveyed, // [R]: from survey
            float* values,            // [R, CANDIDATES]
            int* ids,                 // [R, CANDIDATES]
            int n_vocab) {
    follow_predecessor();
    __shared__ __align__(16) u64 warps[WARPS];
    int part = blockIdx.x, row = blockIdx.y, parts = gridDim.x, lane = threadIdx.x & 31;
    Filters filters(parameters + row * 4, top_k[row], n_vocab);
    if (filters.temperature == 0.0f || !filters.any()) return;
    Surveyed found = surveyed[row];
    if (!found.has_list()) return;
    const int* mine_of = counts + row * parts * NEAR_BINS + found.last;
    if (mine_of[part * NEAR_BINS] == 0) return;
    u64 before = 0;
    for (int i = threadIdx.x; i < part; i += THREADS) before += mine_of[i * NEAR_BINS];
    before = block_sum(before, warps);
    const float* l = logits + (long long)row * n_vocab;
    float largest = logit_of((unsigned)(best[row * parts] >> 32));
    auto is_near = [&](float v) { return near_bin(v, largest) <= found.last; };
    Segment mine = piece_of(piece_of({0, n_vocab}, part, parts), threadIdx.x >> 5, WARPS);
    u64 count = 0, whole;
    for_each(l, mine.begin + lane, 32, mine.end, [&](int, float v) { count += is_near(v); });
    int at = row * CANDIDATES + (int)(before + sum_before(warp_total(count), warps, whole));
    for (int base = mine.begin; base < mine.end; base += 32) {
        float v = base + lane < mine.end ? l[base + lane] : NEGATIVE_INFINITY;
        bool inside = base + lane < mine.end && is_near(v);
        unsigned hit = __ballot_sync(FULL_WARP, inside);
        int place = at + __popc(hit & ((1u << lane) - 1u));
        if (inside) values[place] = v, ids[place] = base + lane;
        at += __popc(hit);
    }
}
