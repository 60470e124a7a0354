// Which experts a token goes to, and with which weights: one warp a token.
//
//   p = softmax | sigmoid | logits | sqrt(softplus(logits));  q = p + bias; with groups: q of all but the best groups
//   (by the sum of their two largest q) = -inf;  ids = top k of q, ties to the lowest id;
//   w = p of the chosen (softmax over them where p = logits);  w /= max(sum w, 2^-14) if asked;  w *= scale
//
// Lane l holds experts l, l + 32, ... in registers. -DPER_LANE = ceil(n_experts / 32), up to 32. Without bias and groups
// the choice is made on the logits, of which p is an increasing function, so that saturated p make no ties.
// Not-a-number logits count as -inf: ids are always in range.

#include "common/follow.cuh"
#include "common/math.cuh"
#include "common/types.cuh"
#include "common/warp.cuh"

enum { GATE_SOFTMAX = 0, GATE_SIGMOID = 1, GATE_SOFTMAX_SELECTED = 2, GATE_SQRT_SOFTPLUS = 3 };

// The greater of two (score, id) pairs over the warp; an id of -1 never wins, equal scores go to the lowest id.
__device__ __forceinline__ void warp_best(float& score, int& id) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        float other = __shfl_xor_sync(FULL_WARP, score, offset);
        int other_id = __shfl_xor_sync(FULL_WARP, id, offset);
        bool wins = other_id >= 0 && (id < 0 || other > score || (other == score && other_id < id));
        score = wins ? other : score;
        id = wins ? other_id : id;
    }
}

// Scores of all but the n_used best of n_groups groups become -inf.
__device__ __forceinline__ void drop_groups(float (&q)[PER_LANE], int n_experts, int n_groups, int n_used) {
    int lane = threadIdx.x & 31, size = n_experts / n_groups;
    float mine = NEGATIVE_INFINITY;
    for (int g = 0; g < n_groups; g++) {
        float best = NEGATIVE_INFINITY;
        int best_id = -1;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int e = i * 32 + lane;
            if (e < n_experts && e / size == g && (best_id < 0 || q[i] > best)) best = q[i], best_id = e;
        }
        warp_best(best, best_id);
        float second = NEGATIVE_INFINITY;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int e = i * 32 + lane;
            if (e < n_experts && e / size == g && e != best_id) second = fmaxf(second, q[i]);
        }
        second = warp_max(second);
        if (lane == g) mine = size > 1 ? best + second : best;
    }
    u32 kept = 0;
    for (int n = 0; n < n_used; n++) {
        float best = mine;
        int best_group = lane < n_groups && !(kept >> lane & 1) ? lane : -1;
        warp_best(best, best_group);
        if (best_group >= 0) kept |= 1u << best_group;
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int e = i * 32 + lane;
        if (e < n_experts && !(kept >> (e / size) & 1)) q[i] = NEGATIVE_INFINITY;
    }
}

extern "C" __global__ void route_topk(const float* logits,  // [T, n_experts]
                                      const float* bias,    // [n_experts], or null
                                      int* ids,             // [T, top_k]
                                      float* weights,       // [T, top_k]
                                      int n_tokens, int n_experts, int top_k, int gating, int n_groups, int n_groups_used,
                                      int renormalise, float scale) {
    follow_predecessor();
    int token = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (token >= n_tokens) return;
    float p[PER_LANE], q[PER_LANE], largest = NEGATIVE_INFINITY;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int e = i * 32 + lane;
        float v = e < n_experts ? logits[(i64)token * n_experts + e] : NEGATIVE_INFINITY;
        p[i] = q[i] = v == v ? v : NEGATIVE_INFINITY;
        largest = fmaxf(largest, p[i]);
    }
    if (gating == GATE_SOFTMAX) {
        largest = fmaxf(warp_max(largest), -3e38f);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) sum += p[i] = expf(p[i] - largest);
        sum = warp_sum(sum);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) p[i] /= fmaxf(sum, 1e-30f);
    } else if (gating == GATE_SIGMOID) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) p[i] = 1.0f / (1.0f + expf(-p[i]));
    } else if (gating == GATE_SQRT_SOFTPLUS) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) p[i] = sqrtf(softplus(p[i]));
    }
    if (bias != nullptr || n_groups > 1) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int e = i * 32 + lane;
            if (e < n_experts) q[i] = p[i] + (bias ? bias[e] : 0.0f);
        }
        if (n_groups > 1) drop_groups(q, n_experts, n_groups, n_groups_used);
    }
    u32 taken = 0;
    int* my_ids = ids + (i64)token * top_k;
    float* my_weights = weights + (i64)token * top_k;
    float sum = 0.0f, most = NEGATIVE_INFINITY;
    for (int k = 0; k < top_k; k++) {
        float best = NEGATIVE_INFINITY;
        int id = -1;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int e = i * 32 + lane;
            if (e < n_experts && !(taken >> i & 1) && (id < 0 || q[i] > best)) best = q[i], id = e;
        }
        warp_best(best, id);
        float weight = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            if (id == i * 32 + lane) weight = p[i], taken |= 1u << i;
        }
        weight = __shfl_sync(FULL_WARP, weight, id & 31);
        sum += weight;
        most = fmaxf(most, weight);
        if (lane == 0) my_ids[k] = id, my_weights[k] = weight;
    }
    __syncwarp();
    if (gating == GATE_SOFTMAX_SELECTED) {
        most = fmaxf(most, -3e38f);
        sum = 0.0f;
        for (int k = 0; k < top_k; k++) sum += expf(my_weights[k] - most);
    }
    float factor = 1.0f;
    if (gating == GATE_SOFTMAX_SELECTED) {
        factor = 1.0f / sum;
        if (renormalise) sum = 1.0f;
    }
    if (renormalise) factor /= fmaxf(sum, 6.103515625e-5f);
    factor *= scale;
    __syncwarp();
    for (int k = lane; k < top_k; k += 32) {
        float w = my_weights[k];
        my_weights[k] = (gating == GATE_SOFTMAX_SELECTED ? expf(w - most) : w) * factor;
    }
}
