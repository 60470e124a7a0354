// Blocks of a cluster, which run at the same time and reach each other's shared memory: compute capability 9.0 and later.
#pragma once

// Every thread of every block of the cluster meets here; what they wrote before can be seen by all.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where the block of that rank has what this one has at `shared`.
template <class T>
__device__ __forceinline__ const T* shared_of_block(const T* shared, int rank) {
    unsigned long long there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
    return (const T*)there;
}
