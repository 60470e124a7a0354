// Items of work for the expert kernels: an expert and some of its assignments. moe/token_sort.cu writes each as one line of the
// cache, so that a warp that asks for an item gets where its expert's pages lie with it, and not after it. Where assignments are not
// sorted, each is an item, which moe/router.cu may have written:
//
//   word 0      {expert | count << 16, first}: places first .. first + count of the sorted order; 0 = there is no such item
//   word 1 + j  where page j of the expert lies, j < MAX_ITEM_PAGES, where an expert has no more
#pragma once

#include "common/types.cuh"

#define ITEM_WORDS 16
#define MAX_ITEM_PAGES (ITEM_WORDS - 1)

__device__ __forceinline__ i64 packed_item(int expert, int first, int count) {
    return (i64)((u64)(u32)first << 32 | (u32)(expert | count << 16));
}
