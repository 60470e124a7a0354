// Where things lie in the pool. One struct = one page layout (memory/specs.py has the same drawing).
//
//   KV page of a group:  layer slot s at s * layer_bytes:
//     keys   [n_head_kv][page_tokens][key_dim]
//     values [n_head_kv][page_tokens][value_dim]
//   SSM page:   one float32 state of one (sequence, layer)
//   conv pages: n_rows consecutive pages of one float32 row
//
// Page id -1 means "no page": of a padding row of a captured batch, or given back because it left the window.
#pragma once

#include "common/follow.cuh"

struct KvView {
    const char* base;           // pool base + layer offset inside a page
    long long page_bytes;
    const int* pages;           // [S, n_blocks] of the group
    int n_blocks;
    int page_tokens;
    int n_head_kv;
    int key_row_bytes;
    int value_row_bytes;
};

// Address of the key row of (sequence, head, position); null where there is no page. `value` gets the value row.
// EARLY: before follow_predecessor().
template <bool EARLY = false>
__device__ __forceinline__ const char* kv_rows(const KvView& kv, int seq, int head, int position, const char*& value) {
    int block = position / kv.page_tokens, slot = position - block * kv.page_tokens;
    const int* entry = kv.pages + (long long)seq * kv.n_blocks + block;
    int page = block >= kv.n_blocks ? -1 : EARLY ? load_early(entry) : *entry;
    if (page < 0) {
        value = nullptr;
        return nullptr;
    }
    const char* at = kv.base + page * kv.page_bytes;
    int row = head * kv.page_tokens + slot;
    value = at + (long long)kv.n_head_kv * kv.page_tokens * kv.key_row_bytes + (long long)row * kv.value_row_bytes;
    return at + (long long)row * kv.key_row_bytes;
}

// State page of a sequence; null where it has none (padding). EARLY: before follow_predecessor().
template <bool EARLY = false>
__device__ __forceinline__ float* state_page(char* pool, long long page_bytes, const int* pages, int stride, int seq,
                                             int column) {
    const int* entry = pages + (long long)seq * stride + column;
    int page = EARLY ? load_early(entry) : *entry;
    return page < 0 ? nullptr : (float*)(pool + page * page_bytes);
}
