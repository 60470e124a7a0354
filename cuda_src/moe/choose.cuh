// Which experts a token goes to, and with which weights, by one warp.
//
//   p = softmax | sigmoid | logits | sqrt(softplus(logits));  q = p + bias; with groups: q of all but the best groups
//   (by the sum of their two largest q) = -inf;  ids = top k of q, ties to the lowest id;
//   w = p of the chosen (softmax over them where p = logits);  w /= max(sum w, 2^-14) if asked;  w *= scale
//
// Lane l holds experts l, l + 32, ... in registers. -DPER_LANE = ceil(n_experts / 32), up to 32. Without bias and groups
// the choice is made on the logits, of which p is an increasing function, so that saturated p make no ties.
// Not-a-number logits count as -inf: ids are always in range.
#pragma once

#include "common/math.cuh"
#include "common/types.cuh"
#include "common/warp.cuh"

enum { GATE_SOFTMAX = 0, GATE_SIGMOID = 1, GATE_SOFTMAX_SELECTED = 2, GATE_SQRT_SOFTPLUS = 3 };

struct Routing {
    const float* bias;  // [n_experts], or null
    int n_experts, top_k, gating, n_groups, n_groups_used, renormalise;
    float scale;
};

// What was chosen, before it goes to memory: of one warp, in shared memory.
struct Chosen {
    int ids[PER_LANE * 32];
    float weights[PER_LANE * 32];
};

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

// A score as an integer of the same order, above zero, which stands for "none"; zeros of both signs are equal, and what
// is no number is the least.
__device__ __forceinline__ u32 score_key(float q) {
    u32 bits = __float_as_uint(q == q ? q : NEGATIVE_INFINITY);
    bits = bits == 0x80000000u ? 0u : bits;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
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

// p[i]: the lane's logits, -inf where there is none; they become the p of the formula.
__device__ __forceinline__ void apply_gate(float (&p)[PER_LANE], int gating) {
    if (gating == GATE_SOFTMAX) {
        float largest = NEGATIVE_INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) largest = fmaxf(largest, p[i]);
        largest = fmaxf(warp_max(largest), -3e38f);
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
}

// One warp: logits of a token (logit(i, e) gives that of expert e, the lane's i-th) to ids and weights, [top_k] each. known() is
// called when chosen.ids are, before the weights.
template <typename Logit, typename Known>
__device__ __forceinline__ void choose_experts(const Routing& r, Chosen& chosen, int* ids, float* weights, Logit logit,
                                               Known known) {
    int lane = threadIdx.x & 31;
    float p[PER_LANE], q[PER_LANE];
    u32 keys[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int e = i * 32 + lane;
        float v = e < r.n_experts ? logit(i, e) : NEGATIVE_INFINITY;
        p[i] = q[i] = v == v ? v : NEGATIVE_INFINITY;
    }
    apply_gate(p, r.gating);
    if (r.bias != nullptr || r.n_groups > 1) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int e = i * 32 + lane;
            if (e < r.n_experts) q[i] = p[i] + (r.bias ? r.bias[e] : 0.0f);
        }
        if (r.n_groups > 1) drop_groups(q, r.n_experts, r.n_groups, r.n_groups_used);
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) keys[i] = i * 32 + lane < r.n_experts ? score_key(q[i]) : 0u;
    for (int k = 0; k < r.top_k; k++) {
        u32 best = keys[0];
        int at = 0;
#pragma unroll
        for (int i = 1; i < PER_LANE; i++)
            if (keys[i] > best) best = keys[i], at = i;
        u32 most = __reduce_max_sync(FULL_WARP, best);
        u32 id = __reduce_min_sync(FULL_WARP, best == most ? (u32)(at * 32 + lane) : ~0u);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (id == i * 32 + lane) chosen.ids[k] = (int)id, chosen.weights[k] = p[i], keys[i] = 0u;
    }
    __syncwarp();
    known();
    float sum = 0.0f, most = NEGATIVE_INFINITY, factor = 1.0f;
#pragma unroll 4
    for (int k = 0; k < r.top_k; k++) {
        sum += chosen.weights[k];
        most = fmaxf(most, chosen.weights[k]);
    }
    if (r.gating == GATE_SOFTMAX_SELECTED) {
        most = fmaxf(most, -3e38f);
        sum = 0.0f;
        for (int k = 0; k < r.top_k; k++) sum += expf(chosen.weights[k] - most);
        factor = 1.0f / sum;
        if (r.renormalise) sum = 1.0f;
    }
    if (r.renormalise) factor /= fmaxf(sum, 6.103515625e-5f);
    factor *= r.scale;
    for (int k = lane; k < r.top_k; k += 32) {
        float w = chosen.weights[k];
        ids[k] = chosen.ids[k];
        weights[k] = (r.gating == GATE_SOFTMAX_SELECTED ? expf(w - most) : w) * factor;
    }
}
