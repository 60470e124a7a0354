// Copies from global to shared memory that run while the block computes.
#pragma once

__device__ __forceinline__ unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }

// 16 bytes from global to shared memory; zeros where `from` is null, which is then not read.
__device__ __forceinline__ void copy16_async(void* to, const char* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from ? from : (const char*)to),
                 "r"(from ? 16 : 0));
}
// Four floats; `aligned` where both addresses are multiples of 16.
__device__ __forceinline__ void copy4_async(float* to, const float* from, bool aligned) {
    if (aligned) {
        copy16_async(to, (const char*)from);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to + i)), "l"(from + i));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int N>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }
