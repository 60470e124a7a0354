// Norm and rotation of one head, by a warp (-D NORM_KIND, NORM_LAST, ADJACENT, ELEMENT as in attention/kv_append.cu).
#pragma once
#include "attention/element.cuh"
#include "common/warp.cuh"

// Rotates n_rot dims of a head in shared memory by a table row: n_rot / 2 cosines, then as many sines.
__device__ __forceinline__ void rotate(float* head, const float* table, int n_rot) {
    int half = n_rot / 2;
    for (int i = threadIdx.x & 31; i < half; i += 32) {
        int a = ADJACENT ? 2 * i : i, b = ADJACENT ? 2 * i + 1 : i + half;
        float c = table[i], s = table[half + i], x = head[a], y = head[b];
        head[a] = x * c - y * s;
        head[b] = x * s + y * c;
    }
    __syncwarp();
}

__device__ __forceinline__ void scale_head(float* head, const float* weight, float inverse, int dim) {
    for (int i = threadIdx.x & 31; i < dim; i += 32) head[i] *= inverse * weight[i];
    __syncwarp();
}

__device__ __forceinline__ float inverse_of(float sum, int norm_dim, float eps) { return rsqrtf(warp_sum(sum) / norm_dim + eps); }

// Norm (where weight is given) and rotation (where table is) of a head in shared memory.
__device__ __forceinline__ void turn_head(float* head, const float* weight, int norm_dim, float inverse, const float* table, int n_rot,
                                          int rope_first) {
    bool norm = NORM_KIND != 0 && weight;
    if (norm && !NORM_LAST) scale_head(head, weight, inverse, norm_dim);
    if (table) rotate(head + rope_first, table, n_rot);
    if (norm && NORM_LAST) scale_head(head, weight, inverse, norm_dim);
}

// One warp: head vector from x to shared memory, norm and rotation there, from there to `back` and to `row` where given.
// inverse: 1 / rms over the whole row (NORM_KIND 2), else unused.
// norm_dim: dims that the norm covers. The rotation starts at dim rope_first.
__device__ __forceinline__ void treat_head(const float* x, float* head, int dim, const float* weight, int norm_dim, float inverse,
                                           float eps, const float* table, int n_rot, int rope_first, float* back,
                                           char* row) {
    int lane = threadIdx.x & 31;
    float sum = 0.0f;
    for (int i = lane; i < dim; i += 32) {
        float v = x[i];
        head[i] = v;
        if (i < norm_dim) sum = fmaf(v, v, sum);
    }
    __syncwarp();
    if (NORM_KIND == 1 && weight) inverse = inverse_of(sum, norm_dim, eps);
    turn_head(head, weight, norm_dim, inverse, table, n_rot, rope_first);
    for (int i = lane; i < dim; i += 32) {
        if (back && ((NORM_KIND && weight) || table)) back[i] = head[i];
        if (row) store_element(row, i, head[i]);
    }
    __syncwarp();
}
