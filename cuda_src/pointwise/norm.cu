// RMS norms of rows: plain, onto the residual stream, and gated by parts of a row.
//
//   rms_norm    out = x / sqrt(mean(x^2) + eps) * weight
//   add_norm    x += scale * rms_norm(delta)
//   gated_norm  norm(x * silu(gate)) * weight            (gate_first, Mamba2)
//               norm(x) * weight * silu(gate)            (DeltaNet)
//
// One block a row (gated_norm: a part of a row); a warp handles 32 neighbouring columns, which are one 8-bit block of
// the quantised copy. The row is read twice, the second time from L1. The block size depends on the width only, so a
// row's sums have one order.

#include "common/math.cuh"
#include "common/warp.cuh"
#include "common/act_store.cuh"

template <typename Value>
__device__ __forceinline__ float inverse_rms(int width, float eps, float* partial, Value value) {
    float sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float v = value(c);
        sum = fmaf(v, v, sum);
    }
    return rsqrtf(block_sum(sum, partial) / width + eps);
}

extern "C" __global__ void rms_norm(const float* __restrict__ x,       // [T, width]
                                    const float* __restrict__ weight,  // [width]
                                    float* __restrict__ out,           // [T, width]
                                    ACT_PARAMETERS,                    // quantised copy
                                    int width, float eps) {
    __shared__ float partial[32];
    long long row = blockIdx.x;
    const float* in = x + row * width;
    float inverse = inverse_rms(width, eps, partial, [&](int c) { return in[c]; });
    store_row(out + row * width, ACT_ARGUMENTS, row, width, 0, width,
              [&](int c) { return in[c] * inverse * weight[c]; });
}

extern "C" __global__ void add_norm(float* __restrict__ x,             // [T, width]
                                    const float* __restrict__ delta,   // [T, width]
                                    const float* __restrict__ weight,  // [width]
                                    int width, float eps, float scale) {
    __shared__ float partial[32];
    long long row = blockIdx.x;
    const float* in = delta + row * width;
    float inverse = inverse_rms(width, eps, partial, [&](int c) { return in[c]; });
    for (int c = threadIdx.x; c < width; c += blockDim.x) x[row * width + c] += scale * (in[c] * inverse * weight[c]);
}

extern "C" __global__ void gated_norm(const float* __restrict__ x,       // [T, width]
                                      const float* __restrict__ gate,    // [T, width]
                                      const float* __restrict__ weight,  // [width], or [width / groups]
                                      float* __restrict__ out,           // [T, width]
                                      ACT_PARAMETERS,                    // quantised copy
                                      int width, int n_groups, int shared_weight, int gate_first, float eps) {
    __shared__ float partial[32];
    long long row = blockIdx.x;
    int part = width / n_groups, first = blockIdx.y * part;
    const float* in = x + row * width + first;
    const float* g = gate + row * width + first;
    const float* w = shared_weight ? weight : weight + first;
    auto value = [&](int c) { return gate_first ? in[c] * silu(g[c]) : in[c]; };
    float inverse = inverse_rms(part, eps, partial, value);
    store_row(out + row * width, ACT_ARGUMENTS, row, width, first, part, [&](int c) {
        float v = value(c) * inverse * w[c];
        return gate_first ? v : v * silu(g[c]);
    });
}
