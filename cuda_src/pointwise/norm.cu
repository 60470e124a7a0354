// RMS norms of rows: plain, onto the residual stream, and gated by parts of a row.
//
//   rms_norm    out = x / sqrt(mean(x^2) + eps) * weight
//   add_norm    x += scale * rms_norm(delta)
//   gated_norm  norm(x * silu(gate)) * weight            (gate_first, Mamba2)
//               norm(x) * weight * silu(gate)            (DeltaNet)
//
// A block has one row, or one part of a row; rows of up to ITEMS values a thread stay in registers, longer ones are read
// twice. Narrow parts have a warp each (gated_norm_narrow). A warp handles 32 neighbouring columns, which are one 8-bit
// block of the quantised copy. The block size depends on the width only, so a row's sums have one order.

#include "common/act_store.cuh"
#include "common/follow.cuh"
#include "common/half_store.cuh"
#include "common/math.cuh"
#include "common/warp.cuh"

#define ITEMS 8
#define NARROW_ITEMS 16  // values of a lane in gated_norm_narrow: parts of up to 512

// Normalises `width` values: value(c) gives one, stored(c, v) takes v / rms. Both are called with the lanes of a warp on
// neighbouring columns, stored() by whole warps (c >= width in the lanes past the end).
template <typename Value, typename Prepare, typename Stored>
__device__ __forceinline__ void normalise(int width, float eps, float* partial, Value value, Prepare prepare, Stored stored) {
    float v[ITEMS], factor[ITEMS], sum = 0.0f;
    bool fits = width <= ITEMS * (int)blockDim.x;
    int lane = threadIdx.x & 31;
    if (fits) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int c = threadIdx.x + i * blockDim.x;
            v[i] = c < width ? value(c) : 0.0f;
            factor[i] = c < width ? prepare(c) : 0.0f;  // loads that need not wait for the sum
        }
#pragma unroll
        for (int i = 0; i < ITEMS; i++) sum = fmaf(v[i], v[i], sum);
    } else {
        for (int c = threadIdx.x; c < width; c += blockDim.x) {
            float x = value(c);
            sum = fmaf(x, x, sum);
        }
    }
    float inverse = rsqrtf(block_sum(sum, partial) / width + eps);
    if (fits) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int c = threadIdx.x + i * blockDim.x;
            if (c - lane < width) stored(c, v[i] * inverse * factor[i]);
        }
    } else {
        for (int c = threadIdx.x; c - lane < width; c += blockDim.x)
            stored(c, c < width ? value(c) * inverse * prepare(c) : 0.0f);
    }
}

extern "C" __global__ void rms_norm(const float* x,       // [T, width]
                                    const float* weight,  // [width]
                                    float* out,           // [T, width]
                                    ACT_PARAMETERS,                    // quantised copy
                                    __half* halves,       // [T, width], or null; width a multiple of 4
                                    float* half_scales,   // [T]
                                    int width, float eps) {
    if (blockIdx.x == 0) fetch_ahead(weight, 4ll * width);
    follow_predecessor();
    __shared__ __align__(16) float partial[32];
    long long row = blockIdx.x;
    const float* in = x + row * width;
    float largest = 0.0f;
    normalise(
        width, eps, partial, [&](int c) { return in[c]; }, [&](int c) { return weight[c]; },
        [&](int c, float v) {
            largest = fmaxf(largest, fabsf(v));
            store_column(out + row * width, ACT_ARGUMENTS, row, width, c, c < width, v);
        });
    // Another thread's columns are read back: they can be seen since the block has met in block_largest().
    if (halves) store_halves(out + row * width, halves, half_scales, row, width, block_largest(largest, partial));
}

extern "C" __global__ void add_norm(float* x,             // [T, width]
                                    const float* delta,   // [T, width]
                                    const float* weight,  // [width]
                                    int width, float eps, float scale) {
    if (blockIdx.x == 0) fetch_ahead(weight, 4ll * width);
    follow_predecessor();
    __shared__ __align__(16) float partial[32];
    long long row = blockIdx.x;
    const float* in = delta + row * width;
    normalise(
        width, eps, partial, [&](int c) { return in[c]; }, [&](int c) { return weight[c]; },
        [&](int c, float v) {
            if (c < width) x[row * width + c] += scale * v;
        });
}

#define GATED_PARAMETERS                                                                                                 \
    const float *x,          /* [T, width] */                                                               \
        const float *gate,   /* [T, width] */                                                               \
        const float *weight, /* [width], or [width / groups] */                                             \
        float *out,          /* [T, width] */                                                               \
        ACT_PARAMETERS, int width, int n_groups, int shared_weight, int gate_first, float eps, int n_parts

// One block a part; grid (T * groups).
extern "C" __global__ void gated_norm(GATED_PARAMETERS) {
    follow_predecessor();
    __shared__ __align__(16) float partial[32];
    long long row = blockIdx.x / n_groups;
    int part = width / n_groups, first = blockIdx.x % n_groups * part;
    const float *in = x + row * width + first, *g = gate + row * width + first;
    const float* w = shared_weight ? weight : weight + first;
    normalise(
        part, eps, partial, [&](int c) { return gate_first ? in[c] * silu(g[c]) : in[c]; },
        [&](int c) { return gate_first ? w[c] : w[c] * silu(g[c]); },
        [&](int c, float v) { store_column(out + row * width, ACT_ARGUMENTS, row, width, first + c, c < part, v); });
}

// One warp a part of at most 32 * N columns; grid (T * groups / warps of a block).
template <int N>
__device__ __forceinline__ void gated_norm_warp(GATED_PARAMETERS) {
    int at = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (at >= n_parts) return;
    long long row = at / n_groups;
    int part = width / n_groups, first = at % n_groups * part;
    const float *in = x + row * width + first, *g = gate + row * width + first;
    const float* w = shared_weight ? weight : weight + first;
    float v[N], factor[N], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        int c = lane + 32 * i;
        v[i] = factor[i] = 0.0f;
        if (c < part) {
            float opened = silu(g[c]);
            v[i] = gate_first ? in[c] * opened : in[c];
            factor[i] = gate_first ? w[c] : w[c] * opened;
        }
        sum = fmaf(v[i], v[i], sum);
    }
    float inverse = rsqrtf(warp_sum(sum) / part + eps);
#pragma unroll
    for (int i = 0; i < N; i++) {
        int c = lane + 32 * i;
        if (32 * i < part)
            store_column(out + row * width, ACT_ARGUMENTS, row, width, first + c, c < part, v[i] * inverse * factor[i]);
    }
}

#define GATED_ARGUMENTS                                                                                                  \
    x, gate, weight, out, act_values, act_scales, act_sums, width, n_groups, shared_weight, gate_first, eps, n_parts

extern "C" __global__ void gated_norm_narrow(GATED_PARAMETERS) {
    follow_predecessor();
    gated_norm_warp<NARROW_ITEMS>(GATED_ARGUMENTS);
}

extern "C" __global__ void gated_norm_128(GATED_PARAMETERS) {
    follow_predecessor();
    gated_norm_warp<4>(GATED_ARGUMENTS);
}
