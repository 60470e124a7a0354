// Where expert rows are read from, and which rows of tokens an expert gets.
//
//   row n of a projection: addresses[expert][first_page + n / rows_per_page] + n % rows_per_page * row_bytes
//
// Every warp looks rows up before it reads them, so that is kept short: n / rows_per_page is the upper half of
// 4 n * page_factor, page_factor = ceil(2^30 / rows_per_page), or 0 where all rows lie in one page (ops/cuda/moe.py).
//
// An address may be a pool page, a loading buffer or pinned host memory: the same loads in the same order read all three,
// so results do not depend on it. An assignment is one (token, slot) pair: a = token * top_k + slot.
//
// -DCONTIGUOUS_EXPERTS=1 is there to measure what the table costs: the same kernel on tensors as a file holds them, with
// row n of an expert at (first_page + expert * rows_per_page + n) * row_bytes behind `addresses` itself.
#pragma once

#ifndef SETTLED_WEIGHTS
#error "expert kernels define SETTLED_WEIGHTS before they include anything: moe_fetch writes what they read"
#endif

#include "common/follow.cuh"
#include "common/items.cuh"
#include "common/types.cuh"
#include "common/warp.cuh"

#ifndef CONTIGUOUS_EXPERTS
#define CONTIGUOUS_EXPERTS 0
#endif
#ifndef ITEM_PAGES
#define ITEM_PAGES 0
#endif
#if defined(TOKEN_TILE) && TOKEN_TILE == 1
#define SINGLE_ASSIGNMENTS true
#else
#define SINGLE_ASSIGNMENTS false
#endif

struct Projection {
    const i64* addresses;  // [n_experts, n_pages]
    int n_pages;           // of an expert
    int first_page;
    int rows_per_page;
    int page_factor;
    int row_bytes;
};

// The address as it is: without this the compiler computes it again before every load of a row, to save registers.
__device__ __forceinline__ const u8* final_address(u64 address) {
#if defined(__CUDA_ARCH__)
    asm("" : "+l"(address));
#endif
    return (const u8*)address;
}

// The page of row n, out of a table whose row of the expert begins at entry `start`.
__device__ __forceinline__ u64 page_of_row(const i64* table, int start, const Projection& p, int n) {
    return load_early(table + ((u32)(start + p.first_page) + __umulhi(4u * (u32)n, (u32)p.page_factor)));
}

__device__ __forceinline__ const u8* row_in_page(u64 page, const Projection& p, int n) {
    u32 row = (u32)n - __umulhi(4u * (u32)n, (u32)p.page_factor) * (u32)p.rows_per_page;
    return final_address(page + (u64)row * (u32)p.row_bytes);
}

__device__ __forceinline__ const u8* expert_row(const Projection& p, int expert, int n) {
#if CONTIGUOUS_EXPERTS
    return final_address((u64)p.addresses + (u64)(p.first_page + expert * p.rows_per_page + n) * (u32)p.row_bytes);
#else
    return row_in_page(page_of_row(p.addresses, expert * p.n_pages, p, n), p, n);
#endif
}

// Rows of item g's expert: ask() when the item is asked for, row() when it is known, both by whole warps. With
// -DITEM_PAGES=1 lane l has word l % ITEM_WORDS of the item's line. (A plain load would not do: compilers move it behind the
// branch that waits for the item.)
struct ItemPages {
    u64 word;

    __device__ __forceinline__ void ask(const i64* items, int g) {
#if ITEM_PAGES && !CONTIGUOUS_EXPERTS
        word = load_early(items + g * ITEM_WORDS + (int)(threadIdx.x & (ITEM_WORDS - 1)));
#endif
    }

    // Whether there is an item, found out by every lane's word: where registers are short, compilers move the load behind
    // a branch that does not need it. (In strips they do not, and asking all lanes costs 1% of 32 tokens' time.)
    __device__ __forceinline__ bool exist() const {
#if ITEM_PAGES && !CONTIGUOUS_EXPERTS
        return __ballot_sync(FULL_WARP, word != 0) & 1;
#else
        return true;
#endif
    }

    __device__ __forceinline__ const u8* row(const Projection& p, int expert, int n) const {
#if ITEM_PAGES && !CONTIGUOUS_EXPERTS
        u32 j = __umulhi(4u * (u32)n, (u32)p.page_factor);
        u64 page = __shfl_sync(FULL_WARP, word, 1 + p.first_page + (int)j);
        return row_in_page(page, p, n);
#else
        return expert_row(p, expert, n);
#endif
    }
};

// The table on its way to the second-level cache, see common/follow.cuh.
__device__ __forceinline__ void fetch_table_ahead(const i64* addresses, int n_experts, int n_pages) {
#if !CONTIGUOUS_EXPERTS && !ITEM_PAGES
    if (blockIdx.x == 0 && blockIdx.y == 0) fetch_ahead(addresses, (i64)sizeof(i64) * n_experts * n_pages);
#endif
}

// An expert's product with row n: with -DEXPERT_FACTORS=1 times the expert's factor, of factors [n_experts]; then plus its
// bias, of bias [n_experts, n_rows] or null.
__device__ __forceinline__ float finish_product(float v, const float* factors, const float* bias, int expert, int n_rows,
                                                int n) {
    float b = bias ? load_constant(bias + (i64)expert * n_rows + n) : 0.0f;
#if EXPERT_FACTORS
    return fmaf(v, load_constant(factors + expert), b);
#else
    return v + b;
#endif
}

// A tile of assignments of one expert: places first .. first + count of the sorted order; count = 0: there is none.
struct Item {
    int expert;
    int first;
    int count;
};

// Where items come from: token_sort.cu's list, or, with -DTOKEN_TILE=1, every assignment is one by itself, whose expert stands
// in ids, or with ITEM_PAGES in items too. The down kernels read all that, and the tables of pages, before
// follow_predecessor(): no kernel that comes right before them writes any of it (that is gate_up, or the scaling of its
// results).
#define ITEM_PARAMETERS                                          \
    const i64 *items,           /* [max items, ITEM_WORDS] */    \
        const int *order,       /* [T * top_k], assignments */   \
        const int *ids,         /* [T * top_k], experts */       \
        const bool *active,     /* [n_experts], or null = all */ \
        int n_experts, int top_k

// Whether there is that item and its expert can be read now.
#define CAN_READ(item) \
    ((item).count > 0 && (u32)(item).expert < (u32)n_experts && (active == nullptr || load_early(active + (item).expert)))

#define ASK_ITEM(g) ask_item(items, ids, g)

__device__ __forceinline__ Item ask_item(const i64* items, const int* ids, int g) {
    if (SINGLE_ASSIGNMENTS && (CONTIGUOUS_EXPERTS || !ITEM_PAGES)) return {load_early(ids + g), g, 1};
    u64 word = load_early(items + g * ITEM_WORDS);  // the list has a place for every block of the grid
    if (SINGLE_ASSIGNMENTS) return {(int)(word & 0xffffu), g, 1};
    return {(int)(word & 0xffffu), (int)(word >> 32), (int)((u32)word >> 16)};
}

__device__ __forceinline__ int item_assignment(const int* order, const Item& item, int i) {
    return SINGLE_ASSIGNMENTS ? item.first + i : order[item.first + i];
}

__device__ __forceinline__ int early_assignment(const int* order, const Item& item, int i) {
    return SINGLE_ASSIGNMENTS ? item.first + i : load_early(order + item.first + i);
}

// a / d by one multiplication, for a < 2^30 / d: a division takes some 25 instructions, each waiting for the last.
struct Divider {
    u32 factor;  // ceil(2^30 / d)

    __device__ __forceinline__ explicit Divider(int d) : factor(((1u << 30) + (u32)d - 1) / (u32)d) {}
    __device__ __forceinline__ int operator()(int a) const { return (int)__umulhi(4u * (u32)a, factor); }
};

// Whose products a thread of a tensor-core kernel holds: of N tiles of tokens the two columns token(j, c), j < N, c < 2. All
// is asked for before the first store, after which the compiler may not move loads.
template <int N>
struct SumTokens {
    int assignment[N][2];
    float scale[N][2];

    // scales: of an activation row; row_of(a): that of an assignment
    template <class RowOf, class Token>
    __device__ __forceinline__ void ask(const int* order, const Item& item, const float* scales, RowOf row_of, Token token) {
#pragma unroll
        for (int j = 0; j < N; j++) {
#pragma unroll
            for (int c = 0; c < 2; c++) assignment[j][c] = item_assignment(order, item, min(token(j, c), item.count - 1));
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
#pragma unroll
            for (int c = 0; c < 2; c++) scale[j][c] = scales[row_of(assignment[j][c])];
        }
    }
};
