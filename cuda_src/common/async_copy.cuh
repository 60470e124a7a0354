// Copies from global to shared memory that run beside the arithmetic (cp.async, compute capability 8.0).
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes, both sides aligned to 16; zeros where `wanted` is false (the source is then not read).
__device__ __forceinline__ void copy_async16(void* shared, const void* global, bool wanted) {
    int n_bytes = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(n_bytes)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most N of this thread's newest groups are under way.
template <int N>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
