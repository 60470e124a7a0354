// The experts of a few tokens from their activations: a float32 router and the choice among its logits in one launch.
//
//   logits[t] = scale * (W x[t] + bias), and what moe/choose.cuh makes of them; with NORM_WIDTH x[t] is the norm of a row
//   of the residual stream first (matmul/normed.cuh), which the blocks also leave in memory
//
// Grid: x = BLOCK_WARPS experts, a warp each; y = tiles of TOKEN_TILE tokens. The last block of a tile to finish chooses,
// a warp a token. Sums have the order of matmul/gemv.cu with 32 lanes a row.
// -DPER_LANE as in moe/choose.cuh; -DTOKEN_TILE 1 2; -DNORM_WIDTH 0, or as in matmul/normed.cuh (then TOKEN_TILE 1);
// -DBLOCK_WARPS. Moves the router once per tile of tokens.

#include "common/act_store.cuh"
#include "common/arrive.cuh"
#include "common/follow.cuh"
#include "matmul/rows.cuh"
#include "moe/choose.cuh"
#if NORM_WIDTH
#include "matmul/normed.cuh"
#endif

#define ROW_LANES 32

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS * 32)
    router(const float* x,            // [T, width]
           const float* norm_weight,  // [width], or null where NORM_WIDTH is 0
           float norm_eps,
           float* normed,             // [T, width], or null where NORM_WIDTH is 0
           ACT_PARAMETERS,            // of normed
           const float* weight,       // [n_experts, width]
           const float* biases,       // [n_experts], or null
           float weight_scale,
           float* logits,             // [T, n_experts]
           unsigned* arrivals,        // [gridDim.y], zero before and after
           const float* bias,         // [n_experts], or null
           int* ids,                  // [T, top_k]
           float* weights,            // [T, top_k]
           int width, int n_tokens, int n_experts, int top_k, int gating, int n_groups, int n_groups_used, int renormalise,
           float scale) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first_token = blockIdx.y * TOKEN_TILE;
    int first = blockIdx.x * BLOCK_WARPS, expert = first + warp;
    if (blockIdx.y == 0) fetch_ahead(weight + (i64)first * width, 4ll * min(BLOCK_WARPS, n_experts - first) * width);
    __shared__ __align__(16) Chosen chosen[TOKEN_TILE];
    __shared__ int is_last;
#if NORM_WIDTH
    __shared__ __align__(16) NormedRow row;
    if (blockIdx.x == 0) fetch_ahead(norm_weight, 4 * NORM_WIDTH);
    follow_predecessor();
    float factor[NORM_EACH][4];
    load_norm(factor, norm_weight);
    norm_row<false>(row, x + (i64)first_token * NORM_WIDTH, factor, norm_eps, normed,
                    ACT_ARGUMENTS, first_token);
    ActView view = {row.f32, nullptr, nullptr, nullptr, NORM_WIDTH};
    int tokens[TOKEN_TILE] = {0};
#else
    follow_predecessor();
    ActView view = {x, nullptr, nullptr, nullptr, width};
    int tokens[TOKEN_TILE];
#pragma unroll
    for (int t = 0; t < TOKEN_TILE; t++) tokens[t] = min(first_token + t, n_tokens - 1);
#endif
    const u8* const rows[1] = {(const u8*)(weight + (i64)min(expert, n_experts - 1) * width)};
    float acc[1][TOKEN_TILE];
    row_dots<f32, ROW_LANES, 1, TOKEN_TILE>(rows, view, tokens, n_tokens - first_token, lane, acc);
    if (lane == 0 && expert < n_experts) {
#pragma unroll
        for (int t = 0; t < TOKEN_TILE; t++) {
            float v = weight_scale * (biases ? acc[0][t] + load_constant(biases + expert) : acc[0][t]);
            if (first_token + t < n_tokens) logits[(i64)(first_token + t) * n_experts + expert] = v;
        }
    }
    if (!arrives_last(arrivals + blockIdx.y, gridDim.x, &is_last)) return;
    int token = first_token + warp;
    if (warp >= TOKEN_TILE || token >= n_tokens) return;
    Routing routing = {bias, n_experts, top_k, gating, n_groups, n_groups_used, renormalise, scale};
    const float* mine = logits + (i64)token * n_experts;
    choose_experts(routing, chosen[warp], ids + (i64)token * top_k, weights + (i64)token * top_k,
                   [&](int e) { return __ldcg(mine + e); });
}
