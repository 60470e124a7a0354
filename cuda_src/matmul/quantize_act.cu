// Forms of an activation that matrices read.
//
//   quantize_act  8-bit blocks of 32 (common/types.cuh): a warp a block; grid x = blocks of 8 warps over all of [T, width]
//   scale_halves  half[t][c] = x[t][c] / scale[t], scale[t] = a power of two that puts the row's largest magnitude at
//                 2^11 .. 2^12: no overflow whatever the input, and full precision down to 2^-25 of the largest. Each
//                 four elements are stored in the order 0 2 1 3 (common/mma.cuh).
//                 Grid x = rows. Reads 4 bytes and writes 2 an element; the second read hits L1.

#include "common/act_store.cuh"
#include "common/follow.cuh"

extern "C" __global__ void quantize_act(const float* __restrict__ x,  // [n_blocks * 32]
                                        i8* __restrict__ values,      // [n_blocks * 32]
                                        float* __restrict__ scales,   // [n_blocks]
                                        int* __restrict__ sums,       // [n_blocks]
                                        i64 n_blocks) {
    follow_predecessor();
    i64 block = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (block < n_blocks)
        store_act_block(ActOut{values, scales, sums}, block, ACT_BLOCK, 0, x[block * ACT_BLOCK + (threadIdx.x & 31)]);
}

extern "C" __global__ void scale_halves(const float* __restrict__ x,  // [T, width], width a multiple of 4
                                        __half* __restrict__ halves,  // [T, width]
                                        float* __restrict__ scales,   // [T]
                                        int width) {
    follow_predecessor();
    __shared__ float partial[32];
    i64 row = blockIdx.x;
    const float4* in = (const float4*)(x + row * width);
    float largest = 0.0f;
    for (int c = threadIdx.x; c < width / 4; c += blockDim.x) {
        float4 v = in[c];
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    }
    largest = warp_max(largest);
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = largest;
    __syncthreads();
    for (int i = 0; i < (int)(blockDim.x >> 5); i++) largest = fmaxf(largest, partial[i]);
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
