// Forms of an activation that matrices read.
//
//   quantize_act  8-bit blocks of 32 (common/types.cuh): a warp a block; grid x = blocks of 8 warps over all of [T, width]
//   scale_halves  halves with one scale a row (common/half_store.cuh); grid x = rows. Reads 4 bytes and writes 2 an
//                 element; the second read hits L1.

#include "common/act_store.cuh"
#include "common/follow.cuh"
#include "common/half_store.cuh"

extern "C" __global__ void quantize_act(const float* x,  // [n_blocks * 32]
                                        i8* values,      // [n_blocks * 32]
                                        float* scales,   // [n_blocks]
                                        int* sums,       // [n_blocks]
                                        i64 n_blocks) {
    follow_predecessor();
    i64 block = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (block < n_blocks)
        store_act_block(ActOut{values, scales, sums}, block, ACT_BLOCK, 0, x[block * ACT_BLOCK + (threadIdx.x & 31)]);
}

extern "C" __global__ void scale_halves(const float* x,  // [T, width], width a multiple of 4
                                        __half* halves,  // [T, width]
                                        float* scales,   // [T]
                                        int width) {
    follow_predecessor();
    __shared__ __align__(16) float partial[32];
    i64 row = blockIdx.x;
    const float4* in = (const float4*)(x + row * width);
    float largest = 0.0f;
    for (int c = threadIdx.x; c < width / 4; c += blockDim.x) {
        float4 v = in[c];
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    }
    store_halves(x + row * width, halves, scales, row, width, block_largest(largest, partial));
}
