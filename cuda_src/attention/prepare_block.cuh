// The heads of one token that a block of attention works on, as attention/kv_append.cu would leave them: query heads in
// shared memory, key and value there and in their pages (-D KEY_DIM, VALUE_DIM, GROUP, WARPS of paged_decode.cu, and those
// of prepare.cuh).
#pragma once
#include "attention/prepare.cuh"
#include "common/types.cuh"

#define THREADS (WARPS * 32)
#define HEAD_DIM (KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM)
#define LANE_DIMS ((HEAD_DIM + 31) / 32)
#define SLOTS_EACH ((GROUP + 2 + WARPS - 1) / WARPS)  // heads that a warp prepares

// What comes out of the matrices of a token, and what is to be done with it.
struct Raw {
    const float *q, *k, *v;  // of the block's first query head; of the KV head
    bool q_has_norm, k_has_norm, rotates;
    int q_norm_dim, k_norm_dim, n_rot, rope_first;
    float eps;
};

// Of the block, in shared memory.
struct Prepared {
    float heads[GROUP + 2][HEAD_DIM];  // query heads, key, value
    float q_norm[KEY_DIM], k_norm[KEY_DIM], table[KEY_DIM];
    element_t key[KEY_DIM], value[VALUE_DIM];  // as they are stored
};

// Constants of the preparation, before the heads are there. The threads meet before they are read.
__device__ __forceinline__ void prepare_ahead(Prepared& to, const Raw& raw, const float* q_norm, const float* k_norm, const float* table) {
    for (int i = threadIdx.x; i < KEY_DIM; i += THREADS) {
        if (raw.q_has_norm && i < raw.q_norm_dim) to.q_norm[i] = load_constant(q_norm + i);
        if (raw.k_has_norm && i < raw.k_norm_dim) to.k_norm[i] = load_constant(k_norm + i);
        if (raw.rotates && i < raw.n_rot) to.table[i] = load_constant(table + i);
    }
}

__device__ __forceinline__ void store_row_of(char* row, const element_t* from, int dim) {
    for (int i = threadIdx.x & 31; i < dim / 8; i += 32) ((uint4*)row)[i] = ((const uint4*)from)[i];
}

// The block's query heads to shared memory; where their rows are given, key and value there and to these.
__device__ __forceinline__ void prepare(Prepared& to, const Raw& raw, int q_stride, char* key_row, char* value_row) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n_slots = key_row ? GROUP + 2 : GROUP;
    float x[SLOTS_EACH][LANE_DIMS], inverse[SLOTS_EACH];  // all asked for before the first is used
#pragma unroll
    for (int s = 0; s < SLOTS_EACH; s++) {
        int slot = warp + s * WARPS, dim = slot <= GROUP ? KEY_DIM : VALUE_DIM;
        const float* from = slot < GROUP ? raw.q + slot * q_stride : slot == GROUP ? raw.k : raw.v;
#pragma unroll
        for (int j = 0; j < LANE_DIMS; j++) x[s][j] = slot < n_slots && lane + 32 * j < dim ? from[lane + 32 * j] : 0.0f;
    }
#pragma unroll
    for (int s = 0; s < SLOTS_EACH; s++) {
        int slot = warp + s * WARPS, norm_dim = slot == GROUP ? raw.k_norm_dim : raw.q_norm_dim;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < LANE_DIMS; j++) {
            if (slot < n_slots && lane + 32 * j < HEAD_DIM) to.heads[slot][lane + 32 * j] = x[s][j];
            if (lane + 32 * j < norm_dim) sum = fmaf(x[s][j], x[s][j], sum);
        }
        inverse[s] = NORM_KIND ? inverse_of(sum, norm_dim, raw.eps) : 0.0f;  // side by side: a warp has several heads
    }
    __syncwarp();
#pragma unroll
    for (int s = 0; s < SLOTS_EACH; s++) {
        int slot = warp + s * WARPS;
        if (slot >= n_slots) break;
        float* head = to.heads[slot];
        bool is_query = slot < GROUP;
        if (slot <= GROUP) {
            const float* weight = is_query ? raw.q_has_norm ? to.q_norm : nullptr : raw.k_has_norm ? to.k_norm : nullptr;
            turn_head(head, weight, is_query ? raw.q_norm_dim : raw.k_norm_dim, inverse[s], raw.rotates ? to.table : nullptr, raw.n_rot,
                      raw.rope_first);
        }
        if (is_query) continue;
        int dim = slot == GROUP ? KEY_DIM : VALUE_DIM;
        element_t* stored = slot == GROUP ? to.key : to.value;
        for (int i = lane; i < dim; i += 32) store_element((char*)stored, i, head[i]);
        __syncwarp();
        store_row_of(slot == GROUP ? key_row : value_row, stored, dim);
    }
    __syncthreads();
}
