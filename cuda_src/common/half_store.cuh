// Storing an activation row as halves with one scale a row.
//
//   half[t][c] = x[t][c] / scale[t], scale[t] = a power of two that puts the row's largest magnitude at 2^11 .. 2^12: no
//   overflow whatever the input, and full precision down to 2^-25 of the largest. Each four values are stored in the
//   order 0 2 1 3, as decoded weights come out of a word (quants/spans.cuh).
#pragma once

#include "common/types.cuh"
#include "common/warp.cuh"

// Largest of the threads' values, none negative; every thread of the block gets it. `partial`: 32 floats of shared memory.
__device__ __forceinline__ float block_largest(float v, float* partial) {
    v = warp_max(v);
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = v;
    __syncthreads();
    for (int i = 0; i < (int)((blockDim.x + 31) >> 5); i++) v = fmaxf(v, partial[i]);
    return v;
}

// The block stores a row of `width` values (a multiple of 4) of which `largest` is the largest magnitude.
__device__ __forceinline__ void store_halves(const float* row_values, __half* halves, float* scales, i64 row, int width,
                                             float largest) {
    const float4* in = (const float4*)row_values;
    // Exponent of the largest value less 11, kept where both the scale and its inverse are normal numbers.
    int exponent = largest > 0.0f ? (int)(__float_as_uint(largest) >> 23) - 11 : 127;
    exponent = min(max(exponent, 1), 253);
    float scale = __uint_as_float((u32)exponent << 23), inverse = __uint_as_float((u32)(254 - exponent) << 23);
    for (int c = threadIdx.x; c < width / 4; c += blockDim.x) {
        float4 v = in[c];
        __half2 a = __floats2half2_rn(v.x * inverse, v.z * inverse), b = __floats2half2_rn(v.y * inverse, v.w * inverse);
        ((uint2*)(halves + row * width))[c] = make_uint2(*(u32*)&a, *(u32*)&b);
    }
    if (threadIdx.x == 0) scales[row] = scale;
}
