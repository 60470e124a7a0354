// The RMS norm of one row as the beginning of a kernel that multiplies it: every block makes it for itself.
//
//   x / sqrt(mean(x^2) + eps) * weight, bit for bit what pointwise/norm.cu makes of it, and its 8-bit form
//
// That kernel's block has NORM_WARPS warps, each with a column of every stretch of 32 NORM_WARPS; here a warp takes the
// part of several of them, one after the other.
//
// -D NORM_WIDTH (a multiple of 32, at most 4096: four columns of each thread of the norm), BLOCK_WARPS
#pragma once

#include "common/act_store.cuh"

#define NORM_WARPS (NORM_WIDTH <= 128 ? 1 : (NORM_WIDTH + 127) / 128)
#define NORM_STEP (32 * NORM_WARPS)
#define NORM_EACH ((NORM_WARPS + BLOCK_WARPS - 1) / BLOCK_WARPS)

struct NormedRow {
    __align__(16) float f32[NORM_WIDTH];
    __align__(16) i8 values[NORM_WIDTH];
    float scales[NORM_WIDTH / ACT_BLOCK];
    int sums[NORM_WIDTH / ACT_BLOCK];
    float partial[32];
};

// The lane's column of step i of the j-th of the warp's parts.
__device__ __forceinline__ int norm_column(int j, int i) { return j * BLOCK_WARPS * 32 + threadIdx.x + i * NORM_STEP; }

// Whether the warp has that step; where all have it the compiler need not ask.
__device__ __forceinline__ bool norm_has(int j, int i) {
    bool part = (j + 1) * BLOCK_WARPS <= NORM_WARPS || j * BLOCK_WARPS + (int)(threadIdx.x >> 5) < NORM_WARPS;
    return part && ((i + 1) * NORM_STEP <= NORM_WIDTH || norm_column(j, i) < NORM_WIDTH);
}

// The norm's weights of the lane's columns.
__device__ __forceinline__ void load_norm(float (&factor)[NORM_EACH][4], const float* weights) {
#pragma unroll
    for (int j = 0; j < NORM_EACH; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            factor[j][i] = 0.0f;
            if (norm_has(j, i)) factor[j][i] = load_constant_here(weights + norm_column(j, i));
        }
}

// The row `x`, normed, to shared memory, by all threads of the block; BLOCKS: and its 8-bit form.
template <bool BLOCKS>
__device__ __forceinline__ void norm_row(NormedRow& s, const float* x, const float (&factor)[NORM_EACH][4], float eps) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float v[NORM_EACH][4];
#pragma unroll
    for (int j = 0; j < NORM_EACH; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) v[j][i] = norm_has(j, i) ? x[norm_column(j, i)] : 0.0f;
#pragma unroll
    for (int j = 0; j < NORM_EACH; j++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) sum = fmaf(v[j][i], v[j][i], sum);
        sum = warp_sum(sum);
        if (lane == 0 && norm_has(j, 0)) s.partial[j * BLOCK_WARPS + warp] = sum;
    }
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < NORM_WARPS; i++) total += s.partial[i];
    float inverse = rsqrtf(total / NORM_WIDTH + eps);
#pragma unroll
    for (int j = 0; j < NORM_EACH; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (norm_has(j, i)) {  // by whole warps
                int c = norm_column(j, i);
                s.f32[c] = v[j][i] * inverse * factor[j][i];
                if (BLOCKS) store_act_block(ActOut{s.values, s.scales, s.sums}, 0, NORM_WIDTH, c / ACT_BLOCK, s.f32[c]);
            }
    __syncthreads();
}

// The blocks of the x axis together leave the row in row `row` of the activation `out`, `act`, by their warps from `first`
// on: after what others wait for.
__device__ __forceinline__ void leave_normed(const NormedRow& s, float* out, const ActOut& act, i64 row, int first = 0) {
    int lane = threadIdx.x & 31, warp = (int)(threadIdx.x >> 5) - first, n = BLOCK_WARPS - first;
    if (warp < 0) return;
    for (int b = blockIdx.x * n + warp; b < NORM_WIDTH / ACT_BLOCK; b += gridDim.x * n)
        store_column(out + row * NORM_WIDTH, act, row, NORM_WIDTH, b * ACT_BLOCK + lane, true, s.f32[b * ACT_BLOCK + lane]);
}
