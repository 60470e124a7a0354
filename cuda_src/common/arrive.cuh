// Which of several blocks comes last, and so sees what all of them wrote.
#pragma once

// True, for all threads, in the last of `n` blocks to call this on one counter, which is zero before and after. What the
// threads of the n blocks wrote before can be seen by it; it reads that past the first-level cache (__ldcg). One thread
// releases what the block wrote and acquires what the others did: a fence by every thread would wait for each of them.
// `is_last`: shared memory. The threads of a block meet here.
__device__ __forceinline__ bool arrives_last(unsigned* counter, unsigned n, int* is_last) {
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned before;
#ifdef __CUDA_ARCH__
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(n - 1) : "memory");
#else
        before = atomicInc(counter, n - 1);
#endif
        *is_last = before == n - 1;
    }
    __syncthreads();
    return *is_last;
}
