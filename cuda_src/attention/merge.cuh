// Folding the splits of a context, in order, with pinned rounding: the same bits wherever the fold runs.
// Maxima and exponents are in base 2.
#pragma once
#include "common/warp.cuh"

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

// partials [n][stride]: maximum, sum, vector; read past L1, since other blocks wrote them.
__device__ __forceinline__ void fold_all(Folded& f, const float* partials, int n, int stride, int pair) {
    for (int first = 0; first < n; first += 4) {
        float2 head[4], vector[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* p = partials + (long long)min(first + i, n - 1) * stride;
            head[i] = __ldcg((const float2*)p);
            vector[i] = __ldcg((const float2*)(p + 2 + 2 * pair));
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first + i < n) fold(f, head[i].x, head[i].y, vector[i]);
    }
}
