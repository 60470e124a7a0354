// The form of an activation that tensor cores read: halves with one scale a row (common/half_store.cuh). Grid x = rows.
// Reads 4 bytes and writes 2 an element; the second read hits L1.

#include "common/follow.cuh"
#include "common/half_store.cuh"

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
