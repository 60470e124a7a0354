// The weighted sum of a token's experts, in the order of the slots.
//
//   out[t][c] (+)= scale * sum over slots s of weights[t][s] * y[t * top_k + s][c]
//
// Grid: x = columns / 4 / threads, y = tokens (in strides of gridDim.y). Moves (top_k + 1 or 2) * width * 4 bytes a token.

#include "common/follow.cuh"
#include "common/types.cuh"

extern "C" __global__ void moe_combine(const float* y,        // [T * top_k, width], width a multiple of 4
                                       const float* weights,  // [T, top_k]
                                       float* out,            // [T, width]
                                       int n_tokens, int top_k, int width, int add, float scale) {
    follow_predecessor();
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= width / 4) return;
    for (int token = blockIdx.y; token < n_tokens; token += gridDim.y) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int s = 0; s < top_k; s++) {
            i64 a = (i64)token * top_k + s;
            float w = weights[a];
            float4 v = ((const float4*)(y + a * width))[c];
            sum.x = fmaf(w, v.x, sum.x), sum.y = fmaf(w, v.y, sum.y);
            sum.z = fmaf(w, v.z, sum.z), sum.w = fmaf(w, v.w, sum.w);
        }
        float4* at = (float4*)(out + (i64)token * width) + c;
        float4 before = add ? *at : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *at = make_float4(fmaf(scale, sum.x, before.x), fmaf(scale, sum.y, before.y), fmaf(scale, sum.z, before.z),
                          fmaf(scale, sum.w, before.w));
    }
}
