// Folding the splits of a context, in order, with pinned rounding: the same bits wherever the fold runs.
// Maxima and exponents are in base 2.
#pragma once
#include "common/math.cuh"
#include "common/warp.cuh"

#define LOG2E 1.4426950408889634f

struct Folded {
    float maximum, sum;
    float2 vector;  // two dims of the un-normalised output
};

__device__ __forceinline__ void fold(Folded& f, float maximum, float sum, float2 vector) {
    float top = fmaxf(f.maximum, maximum);
    float old = f.maximum == NEGATIVE_INFINITY ? 0.0f : exp2f(f.maximum - top);
    float add = maximum == NEGATIVE_INFINITY ? 0.0f : exp2f(maximum - top);
    f.maximum = top;
    f.sum = __fmaf_rn(f.sum, old, __fmul_rn(sum, add));
    f.vector.x = __fmaf_rn(f.vector.x, old, __fmul_rn(vector.x, add));
    f.vector.y = __fmaf_rn(f.vector.y, old, __fmul_rn(vector.y, add));
}

// partials [n][stride]: maximum, sum, vector; read past L1, since other blocks wrote them, AHEAD at a time.
template <int AHEAD = 4>
__device__ __forceinline__ void fold_all(Folded& f, const float* partials, int n, int stride, int pair) {
    for (int first = 0; first < n; first += AHEAD) {
        float2 head[AHEAD], vector[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const float* p = partials + (long long)min(first + i, n - 1) * stride;
            head[i] = __ldcg((const float2*)p);
            vector[i] = __ldcg((const float2*)(p + 2 + 2 * pair));
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + i < n) fold(f, head[i].x, head[i].y, vector[i]);
    }
}

// out = vector / sum with the sink in the denominator, times sigmoid(gate)
__device__ __forceinline__ float2 finish_pair(const Folded& f, const float* sink, const float* gate) {
    float low = sink ? *sink * LOG2E : NEGATIVE_INFINITY, top = fmaxf(f.maximum, low);
    float shrink = f.sum > 0.0f ? exp2f(f.maximum - top) : 0.0f;
    float sum = f.sum * shrink + (sink ? exp2f(low - top) : 0.0f);
    float factor = sum > 0.0f ? shrink / sum : 0.0f;
    float2 o = make_float2(f.vector.x * factor, f.vector.y * factor);
    if (gate) o.x *= sigmoid(gate[0]), o.y *= sigmoid(gate[1]);
    return o;
}
