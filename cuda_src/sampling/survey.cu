// The reading of the logits for draws, by many blocks a row (after argmax.cu).
//
// survey     a row without filters: sums of exp((l - max) / temperature) per part; the last part picks the part in which
//            the drawn number lies, in id order, and walks through that one. A row with filters: masses and number of its
//            candidates per part, for draw.cu (grid: parts, rows)
// collect    the candidates of the rows with filters, in id order, where they are few enough (grid: parts, rows)
//
// Bytes moved: each reads the logits once; collect only the parts that have candidates.

#define THREADS 256
#define MAX_PARTS 64
#include "common/arrive.cuh"
#include "common/follow.cuh"
#include "sampling/rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    survey(const float* logits,      // [R, n_vocab]
           const u64* best,          // [R, parts]: from argmax
           const float* parameters,  // [R, 4]: temperature, top_p, min_p, uniform
           const int* top_k,         // [R]
           u64* sums,                // [R, parts, 3]: mass, mass of the candidates, their number
           unsigned* arrivals,       // [R], zero before and after
           int* out_ids,             // [R]
           int n_vocab) {
    follow_predecessor();
    __shared__ u64 warps[WARPS], of_parts[MAX_PARTS];
    __shared__ int is_last;
    int part = blockIdx.x, row = blockIdx.y, parts = gridDim.x;
    Filters filters(parameters + row * 4, top_k[row], n_vocab);
    if (filters.temperature == 0.0f) return;  // argmax has chosen
    const float* l = logits + (long long)row * n_vocab;
    float largest = logit_of((unsigned)(best[row * parts] >> 32));
    Segment mine = piece_of({0, n_vocab}, part, parts);
    u64* to = sums + (row * parts + part) * 3;
    if (filters.any()) {
        u64 all = 0, in = 0, count = 0;
        for_each(l, mine.begin + threadIdx.x, THREADS, mine.end, [&](int, float v) {
            u64 mass = mass_of(v, largest);
            all += mass;
            if (v >= largest - RANGE) count++, in += mass;
        });
        all = block_sum(all, warps), in = block_sum(in, warps), count = block_sum(count, warps);
        if (threadIdx.x == 0) to[0] = all, to[1] = in, to[2] = count;
        return;
    }
    float inverse = 1.0f / filters.temperature;
    auto weight = [&](int, float v) { return weight_of(v, largest, inverse); };
    u64 sum = 0;
    for_each(l, mine.begin + threadIdx.x, THREADS, mine.end, [&](int i, float v) { sum += weight(i, v); });
    sum = block_sum(sum, warps);
    if (threadIdx.x == 0) to[0] = sum;
    if (!arrives_last(arrivals + row, parts, &is_last)) return;
    if (threadIdx.x < parts) of_parts[threadIdx.x] = __ldcg(sums + (row * parts + threadIdx.x) * 3);
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
            const u64* sums,          // [R, parts, 3]: from survey
            float* values,            // [R, CANDIDATES]
            int* ids,                 // [R, CANDIDATES]
            int n_vocab) {
    follow_predecessor();
    __shared__ u64 warps[WARPS];
    int part = blockIdx.x, row = blockIdx.y, parts = gridDim.x, lane = threadIdx.x & 31;
    Filters filters(parameters + row * 4, top_k[row], n_vocab);
    if (filters.temperature == 0.0f || !filters.any()) return;
    u64 first = 0, total = 0;
    for (int i = 0; i < parts; i++) {
        u64 count = sums[(row * parts + i) * 3 + 2];
        if (i < part) first += count;
        total += count;
    }
    if (total > CANDIDATES || sums[(row * parts + part) * 3 + 2] == 0) return;
    const float* l = logits + (long long)row * n_vocab;
    float least = logit_of((unsigned)(best[row * parts] >> 32)) - RANGE;
    Segment mine = piece_of(piece_of({0, n_vocab}, part, parts), threadIdx.x >> 5, WARPS);
    u64 count = 0, whole;
    for_each(l, mine.begin + lane, 32, mine.end, [&](int, float v) { count += v >= least; });
    int at = row * CANDIDATES + (int)(first + sum_before(warp_total(count), warps, whole));
    for (int base = mine.begin; base < mine.end; base += 32) {
        float v = base + lane < mine.end ? l[base + lane] : NEGATIVE_INFINITY;
        bool inside = base + lane < mine.end && v >= least;
        unsigned hit = __ballot_sync(FULL_WARP, inside);
        int place = at + __popc(hit & ((1u << lane) - 1u));
        if (inside) values[place] = v, ids[place] = base + lane;
        at += __popc(hit);
    }
}
