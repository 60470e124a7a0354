// The experts of each token from its router logits (moe/choose.cuh has the formula).
//
// grid (tokens / warps of a block), a warp a token. -DPER_LANE as there. Bytes moved: the logits once.

#include "common/follow.cuh"
#include "moe/choose.cuh"

#define MAX_WARPS 4

extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32)
    route_topk(const float* logits,  // [T, n_experts]
               const float* bias,    // [n_experts], or null
               int* ids,             // [T, top_k]
               float* weights,       // [T, top_k]
               int n_tokens, int n_experts, int top_k, int gating, int n_groups, int n_groups_used, int renormalise,
               float scale) {
    follow_predecessor();
    __shared__ __align__(16) Chosen chosen[MAX_WARPS];
    int warp = threadIdx.x >> 5, token = blockIdx.x * (blockDim.x >> 5) + warp;
    if (token >= n_tokens) return;
    Routing routing = {bias, n_experts, top_k, gating, n_groups, n_groups_used, renormalise, scale};
    const float* row = logits + (i64)token * n_experts;
    choose_experts(routing, chosen[warp], ids + (i64)token * top_k, weights + (i64)token * top_k,
                   [&](int, int e) { return row[e]; }, [] {});
}
