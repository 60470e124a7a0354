// Assignments (token, slot) grouped by expert: a stable counting sort, and the list of items for the expert kernels.
//
//   order[..]   assignments, by expert, then by index
//   items[g]    an expert and up to item_tokens of its places, in the order of experts, as common/items.cuh has it; behind the
//               last one up to max_items there are none. With n_pages > 0 also the expert's row of the table
//
// moe_sort: up to 1024 assignments in one block. More: moe_sort_count (a block per 1024 assignments), moe_sort_scan (one
// block), moe_sort_place (as moe_sort_count). An expert that is not active gets places and no items. Blocks have 1024
// threads; thread e of a scan owns expert e. An expert id outside the range is dropped.

#include "common/follow.cuh"
#include "common/items.cuh"
#include "common/types.cuh"
#include "common/warp.cuh"

#ifndef CONTIGUOUS_EXPERTS
#define CONTIGUOUS_EXPERTS 0
#endif
#define SORT_THREADS 1024
#define MAX_EXPERTS 1024

// Sum of `value` over lower threads; `total` gets the whole sum. `partial`: 33 words, used up by the call.
__device__ __forceinline__ u64 exclusive_scan(u64 value, u64* partial, u64& total) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u64 sum = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        u64 other = __shfl_up_sync(FULL_WARP, sum, offset);
        if (lane >= offset) sum += other;
    }
    if (lane == 31) partial[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        u64 own = partial[lane], running = own;
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            u64 other = __shfl_up_sync(FULL_WARP, running, offset);
            if (lane >= offset) running += other;
        }
        partial[lane] = running - own;
        if (lane == 31) partial[32] = running;
    }
    __syncthreads();
    total = partial[32];
    return partial[warp] + sum - value;
}

__device__ __forceinline__ void fetch_table_ahead(const i64* addresses, int n_pages, int n_experts) {
    if (!CONTIGUOUS_EXPERTS) fetch_ahead(addresses, (i64)sizeof(i64) * n_experts * n_pages);
}

// The pages of the experts, one a thread, on their way while the assignments are counted.
struct PageList {
    u64 first;
    int n, n_pages;    // pages of all experts, 0 where no lists are wanted; of one
    int expert, page;  // whose the first is

    __device__ __forceinline__ void ask(const i64* addresses, int n_expert_pages, int n_experts) {
        n = CONTIGUOUS_EXPERTS ? 0 : n_experts * n_expert_pages;
        n_pages = n_expert_pages;
        first = (int)threadIdx.x < n ? load_early(addresses + threadIdx.x) : 0;
        expert = n ? (int)threadIdx.x / n_pages : 0;
        page = (int)threadIdx.x - expert * n_pages;
    }

    // To every item of their expert: first_tile[e] .. first_tile[e] + n_tiles[e].
    __device__ __forceinline__ void copy(const i64* addresses, const int* first_tile, const u16* n_tiles, i64* items) const {
        for (int i = threadIdx.x; i < n; i += SORT_THREADS) {
            bool is_first = i < SORT_THREADS;
            int e = is_first ? expert : i / n_pages, j = is_first ? page : i - e * n_pages;
            i64 address = is_first ? (i64)first : addresses[i];
            i64* to = items + (i64)first_tile[e] * ITEM_WORDS + 1 + j;
            for (int left = n_tiles[e]; left > 0; left--, to += ITEM_WORDS) *to = address;
        }
    }
};

// From the number of assignments of expert threadIdx.x: its first place; writes its items, and where those are into
// first_tile and n_tiles.
__device__ __forceinline__ int plan_expert(int count, const bool* active, int n_experts, int item_tokens, i64* items,
                                           int max_items, u64* partial, int* first_tile, u16* n_tiles) {
    int expert = threadIdx.x;
    bool readable = expert < n_experts && (active == nullptr || active[expert]);
    int tiles = readable ? (count + item_tokens - 1) / item_tokens : 0;
    u64 total, before = exclusive_scan((u64)(u32)tiles << 32 | (u32)count, partial, total);  // both sums at once
    int first = (int)(u32)before, at = (int)(before >> 32), n_all_tiles = (int)(total >> 32);
    first_tile[expert] = at;
    n_tiles[expert] = (u16)tiles;
    for (int i = 0; i < tiles; i++)
        items[(i64)(at + i) * ITEM_WORDS] =
            packed_item(expert, first + i * item_tokens, min(item_tokens, count - i * item_tokens));
    for (int i = n_all_tiles + (int)threadIdx.x; i < max_items; i += SORT_THREADS) items[(i64)i * ITEM_WORDS] = 0;
    return first;
}

// Counts of each warp's experts, and the rank of this thread's assignment among the equal ones of its warp.
__device__ __forceinline__ int count_in_warp(u8 (*counts)[MAX_EXPERTS], int expert, int n_experts) {
    int* own = (int*)counts[threadIdx.x >> 5];
    for (int i = threadIdx.x & 31; 4 * i < n_experts; i += 32) own[i] = 0;
    __syncwarp();
    u32 equal = __match_any_sync(FULL_WARP, expert);
    int rank = __popc(equal & ((1u << (threadIdx.x & 31)) - 1));
    if (rank == 0 && expert < n_experts) counts[threadIdx.x >> 5][expert] = (u8)__popc(equal);
    __syncthreads();
    return rank;
}

__device__ __forceinline__ int read_expert(const int* ids, int i, int n, int n_experts) {
    int expert = i < n ? ids[i] : n_experts;
    return (u32)expert < (u32)n_experts ? expert : n_experts;
}

__device__ __forceinline__ int rank_in_block(u8 (*counts)[MAX_EXPERTS], int expert, int rank) {
    for (int warp = 0; warp < (int)(threadIdx.x >> 5); warp++) rank += counts[warp][expert];
    return rank;
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    moe_sort(const int* ids,        // [n]
             const bool* active,    // [n_experts], or null = all
             int* order,            // [n]
             i64* items,            // [max_items, ITEM_WORDS]
             const i64* addresses,  // [n_experts, n_pages]
             int n_pages, int n, int n_experts, int item_tokens, int max_items) {
    fetch_table_ahead(addresses, n_pages, n_experts);
    follow_predecessor();
    PageList pages;
    pages.ask(addresses, n_pages, n_experts);
    __shared__ __align__(16) u8 counts[32][MAX_EXPERTS];
    __shared__ __align__(16) u64 partial[33];
    __shared__ __align__(16) int first[MAX_EXPERTS], first_tile[MAX_EXPERTS];
    __shared__ __align__(16) u16 n_tiles[MAX_EXPERTS];
    int expert = read_expert(ids, threadIdx.x, n, n_experts);
    int rank = count_in_warp(counts, expert, n_experts);
    int count = 0;
    if ((int)threadIdx.x < n_experts) {
        for (int warp = 0; warp < (n + 31) / 32; warp++) count += counts[warp][threadIdx.x];
    }
    first[threadIdx.x] = plan_expert(count, active, n_experts, item_tokens, items, max_items, partial, first_tile, n_tiles);
    __syncthreads();
    pages.copy(addresses, first_tile, n_tiles, items);  // on its way while ranks are added up
    if (expert < n_experts) order[first[expert] + rank_in_block(counts, expert, rank)] = threadIdx.x;
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    moe_sort_count(const int* ids,     // [n]
                   int* block_counts,  // [blocks, n_experts]
                   int n, int n_experts) {
    follow_predecessor();
    __shared__ __align__(16) int counts[MAX_EXPERTS];
    counts[threadIdx.x] = 0;
    __syncthreads();
    int expert = read_expert(ids, blockIdx.x * SORT_THREADS + threadIdx.x, n, n_experts);
    if (expert < n_experts) atomicAdd(counts + expert, 1);
    __syncthreads();
    if (threadIdx.x < n_experts) block_counts[blockIdx.x * n_experts + threadIdx.x] = counts[threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    moe_sort_scan(int* block_counts,     // [blocks, n_experts]; becomes each block's first places
                  const bool* active,    // [n_experts], or null = all
                  i64* items,            // [max_items, ITEM_WORDS]
                  const i64* addresses,  // [n_experts, n_pages]
                  int n_pages, int n_blocks, int n_experts, int item_tokens, int max_items) {
    fetch_table_ahead(addresses, n_pages, n_experts);
    follow_predecessor();
    PageList pages;
    pages.ask(addresses, n_pages, n_experts);
    __shared__ __align__(16) u64 partial[33];
    __shared__ __align__(16) int first_tile[MAX_EXPERTS];
    __shared__ __align__(16) u16 n_tiles[MAX_EXPERTS];
    int expert = threadIdx.x, count = 0;
    if (expert < n_experts) {
        for (int b = 0; b < n_blocks; b++) count += block_counts[b * n_experts + expert];
    }
    int place = plan_expert(count, active, n_experts, item_tokens, items, max_items, partial, first_tile, n_tiles);
    __syncthreads();
    pages.copy(addresses, first_tile, n_tiles, items);  // on its way while places are added up
    if (expert < n_experts) {
        for (int b = 0; b < n_blocks; b++) {
            int here = block_counts[b * n_experts + expert];
            block_counts[b * n_experts + expert] = place;
            place += here;
        }
    }
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    moe_sort_place(const int* ids,           // [n]
                   const int* block_places,  // [blocks, n_experts]
                   int* order,               // [n]
                   int n, int n_experts) {
    follow_predecessor();
    __shared__ __align__(16) u8 counts[32][MAX_EXPERTS];
    int i = blockIdx.x * SORT_THREADS + threadIdx.x, expert = read_expert(ids, i, n, n_experts);
    int rank = count_in_warp(counts, expert, n_experts);
    if (expert < n_experts) order[block_places[blockIdx.x * n_experts + expert] + rank_in_block(counts, expert, rank)] = i;
}
