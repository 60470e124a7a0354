// Dependent launches: from compute capability 9.0 on a kernel may start while the kernel before it in the stream ends.
//
// Every kernel calls follow_predecessor() once, by all its threads, before it touches what an earlier kernel wrote or may
// still read. It returns when the kernel before has ended and its writes can be seen; since that one waited in the same
// way, all earlier ones have ended too. Only what no kernel writes (weights) may be touched before. What kernels write is
// never read through the path for constants (common/types.cuh): waiting does not empty its cache.
#pragma once

__device__ __forceinline__ void follow_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");  // the next kernel's blocks may come where there is room
#endif
}

// Asks for n_bytes to come to the second-level cache, by all threads of a block together: called before
// follow_predecessor(), so that they come while the kernel before still works. Nothing is read, so it does not matter who
// still writes there. Not for host memory, which that cache may not keep.
__device__ __forceinline__ void fetch_ahead(const void* from, long long n_bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    for (long long at = 128 * threadIdx.x; at < n_bytes; at += 128 * blockDim.x)
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)from + at));
#endif
}
