// Four floats from global to shared memory beside the arithmetic, whatever the source's alignment.
#pragma once
#include "common/async_copy.cuh"

__device__ __forceinline__ void copy_async_float(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// `aligned`: both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_floats(float* to, const float* from, bool aligned) {
    if (aligned) {
        copy_async16(to, from, true);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) copy_async_float(to + i, from + i);
}
