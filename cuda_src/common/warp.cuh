// Sums and maxima over a warp and over a block, in one fixed order.
#pragma once

#define FULL_WARP 0xffffffffu
#define NEGATIVE_INFINITY __int_as_float(0xff800000)  // NVRTC has no INFINITY without the host's headers

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(FULL_WARP, v, offset);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, offset));
    return v;
}

// Sum over groups of `lanes` neighbouring lanes (a power of two).
template <int LANES>
__device__ __forceinline__ float group_sum(float v) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset >>= 1) v += __shfl_xor_sync(FULL_WARP, v, offset);
    return v;
}

// Sum over the block; every thread gets it. `partial`: 32 floats of shared memory, free again after the call.
__device__ __forceinline__ float block_sum(float v, float* partial) {
    int warp = threadIdx.x >> 5, n_warps = (blockDim.x + 31) >> 5;
    v = warp_sum(v);
    if ((threadIdx.x & 31) == 0) partial[warp] = v;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < n_warps; i++) total += partial[i];
    __syncthreads();
    return total;
}
