// Norm and rotation of the queries and keys of a step, and the write of keys and values into their pages.
//
//   vector = x / sqrt(mean(x^2) + eps) * weight,   (a, b) -> (a cos - b sin, a sin + b cos)
//
// grid (T, slots): slots are the query heads, then the key heads, then the value heads, WARPS of them a block, one
// warp each. For norms over all heads of a row (NORM_KIND 2) the block is one of q, k, v and its warps walk the heads.
//
// -D  NORM_KIND 0 none, 1 per head, 2 over the row;  NORM_LAST 0 norm then rotation, 1 rotation then norm
//     ADJACENT 0 pairs (i, i + n_rot / 2), 1 pairs (2i, 2i + 1);  ELEMENT 0 f16, 1 bf16, 2 f32;  MAX_DIM
// Bytes moved: q and k once in and out, v once in, KV rows once out.

#include "attention/prepare.cuh"
#include "common/follow.cuh"
#include "common/paged.cuh"
#include "common/warp.cuh"

#define WARPS 4

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    prepare_qkv(float* q,                 // [T, n_head * q_stride]
                float* k,                 // [T, n_head_kv * key_dim]
                float* v,                 // [T, n_head_kv * value_dim]
                const float* q_norm,      // [q_norm_dim], or [n_head * key_dim], or null
                const float* k_norm,      // [k_norm_dim], or [n_head_kv * key_dim], or null
                const float* rope,        // [n_positions, n_rot] or null
                const int* positions,     // [T]
                const int* seq_of_token,  // [T]
                char* kv_base,                         // pool base + layer offset
                const int* pages,         // [S, n_blocks]
                long long page_bytes, int n_blocks, int page_tokens, int n_head, int n_head_kv, int q_stride,
                int key_dim, int value_dim, int q_norm_dim, int k_norm_dim, int n_rot, int rope_first, float eps) {
    if (NORM_KIND && blockIdx.x == 0 && blockIdx.y == 0) {
        if (q_norm) fetch_ahead(q_norm, 4ll * q_norm_dim);
        if (k_norm) fetch_ahead(k_norm, 4ll * k_norm_dim);
    }
    follow_predecessor();
    __shared__ __align__(16) float heads[WARPS][MAX_DIM];
    __shared__ __align__(16) float partial[32];
    int token = blockIdx.x, warp = threadIdx.x >> 5;
    int position = positions[token];
    if (position < 0) return;  // padding of a captured batch
    const float* table = rope ? rope + (long long)position * n_rot : nullptr;
    KvView kv{kv_base, page_bytes, pages, n_blocks, page_tokens, n_head_kv, key_dim * ELEMENT_BYTES,
              value_dim * ELEMENT_BYTES};
    float inverse = 0.0f;
    int begin = blockIdx.y * WARPS + warp, end = begin + 1, step = 1;
    if (NORM_KIND == 2) {
        int part = blockIdx.y, n = part == 0 ? n_head : n_head_kv;
        begin = (part == 0 ? 0 : part == 1 ? n_head : n_head + n_head_kv) + warp;
        end = begin - warp + n;
        step = WARPS;
        const float* x = part == 0 ? q + (long long)token * n_head * q_stride : k + (long long)token * n_head_kv * key_dim;
        int stride = part == 0 ? q_stride : key_dim;
        if (part < 2) {
            float sum = 0.0f;
            for (int i = threadIdx.x; i < n * key_dim; i += WARPS * 32) {
                float value = x[(i / key_dim) * stride + i % key_dim];
                sum = fmaf(value, value, sum);
            }
            inverse = rsqrtf(block_sum(sum, partial) / (n * key_dim) + eps);
        }
    }
    for (int slot = begin; slot < end && slot < n_head + 2 * n_head_kv; slot += step) {
        if (slot < n_head) {
            const float* weight = q_norm && NORM_KIND == 2 ? q_norm + slot * key_dim : q_norm;
            float* x = q + ((long long)token * n_head + slot) * q_stride;
            treat_head(x, heads[warp], key_dim, weight, q_norm_dim, inverse, eps, table, n_rot, rope_first, x, nullptr);
            continue;
        }
        int head = (slot - n_head) % n_head_kv;
        const char* value_row;
        char* key_row = (char*)kv_rows(kv, seq_of_token[token], head, position, value_row);
        if (slot < n_head + n_head_kv) {
            const float* weight = k_norm && NORM_KIND == 2 ? k_norm + head * key_dim : k_norm;
            float* x = k + ((long long)token * n_head_kv + head) * key_dim;
            treat_head(x, heads[warp], key_dim, weight, k_norm_dim, inverse, eps, table, n_rot, rope_first, x, key_row);
        } else if (value_row) {
            const float* from = v + ((long long)token * n_head_kv + head) * value_dim;
            for (int i = threadIdx.x & 31; i < value_dim; i += 32) store_element((char*)value_row, i, from[i]);
        }
    }
}
