// Recorded routing in place of the router's choice, for benchmarks: ids[t] = recorded[t, layer].

#include "common/follow.cuh"

extern "C" __global__ void replay_ids(const int* recorded,  // [T, row_ids]: ids of all layers
                                      int* ids,             // [T, top_k]
                                      int n, int top_k, int row_ids, int first) {
    follow_predecessor();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) ids[i] = recorded[(i / top_k) * row_ids + first + i % top_k];
}
