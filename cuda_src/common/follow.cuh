// Dependent launches: from compute capability 9.0 on a kernel may start while the kernel before it in the stream ends.
//
// Every kernel calls follow_predecessor() once, by all its threads, before it touches what an earlier kernel wrote or may
// still read. It returns when the kernel before has ended and its writes can be seen; since that one waited in the same
// way, all earlier ones have ended too. Only what no kernel writes (weights) may be touched before. What kernels write is
// never read through the path for constants (common/types.cuh): waiting does not empty its cache.
//
// More may be read before, by load_early(), which looks past the first-level cache:
//   - what kernels wrote before the last one, if it is known which one that is. All its blocks had returned from
//     follow_predecessor() when the first block here started, so those earlier ones had ended;
//   - what was written before the step: kernels start early only inside of a step's graph (ops/cuda/dependent.py), and a graph
//     starts when all before it has ended. So the batch may be read, and the keys and values of earlier steps.
// A block that has nothing to do may end without waiting, if another block of its kernel waits.
#pragma once

__device__ __forceinline__ void follow_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");  // the next kernel's blocks may come where there is room
#endif
}

// Read where it is written and not later, past the first-level cache, which may hold what was there before.
__device__ __forceinline__ unsigned long long load_early(const long long* p) {
#if defined(__CUDA_ARCH__)
    unsigned long long v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
#else
    return (unsigned long long)*p;
#endif
}

__device__ __forceinline__ int load_early(const int* p) {
#if defined(__CUDA_ARCH__)
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
#else
    return *p;
#endif
}

__device__ __forceinline__ int4 load_early(const int4* p) {
#if defined(__CUDA_ARCH__)
    int4 v;
    asm volatile("ld.relaxed.gpu.global.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
#else
    return *p;
#endif
}

__device__ __forceinline__ bool load_early(const bool* p) {
#if defined(__CUDA_ARCH__)
    unsigned int v;
    asm volatile("ld.relaxed.gpu.global.u8 %0, [%1];" : "=r"(v) : "l"(p));
    return v != 0;
#else
    return *p;
#endif
}

// The 128 bytes around an address.
__device__ __forceinline__ void fetch_line_ahead(const void* at) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

// Asks for n_bytes to come to the second-level cache, by all threads of a block together: called before
// follow_predecessor(), so that they come while the kernel before still works. Nothing is read, so it does not matter who
// still writes there. Not for host memory, which that cache may not keep.
__device__ __forceinline__ void fetch_ahead(const void* from, long long n_bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    for (long long at = 128 * threadIdx.x; at < n_bytes; at += 128 * blockDim.x) fetch_line_ahead((const char*)from + at);
#endif
}
