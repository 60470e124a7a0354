// Storing an activation row in float32 and, where matrices read it, in 8-bit blocks (types.cuh has their layout).
#pragma once
#include "common/act_quant.cuh"

#define ACT_PARAMETERS i8 *__restrict__ act_values, float *__restrict__ act_scales, int *__restrict__ act_sums
#define ACT_ARGUMENTS (ActOut{act_values, act_scales, act_sums})

// The block stores columns first .. first + part of a row of `width`; value(c) gives column first + c. For the 8-bit
// form, `first` is a multiple of 32, and so is `part`.
template <typename Value>
__device__ __forceinline__ void store_row(float* out_row, const ActOut& act, i64 row, int width, int first, int part,
                                          Value value) {
    int lane = threadIdx.x & 31;
    for (int base = threadIdx.x - lane; base < part; base += blockDim.x) {
        int c = base + lane;
        float v = c < part ? value(c) : 0.0f;
        if (c < part) out_row[first + c] = v;
        if (act.values) store_act_block(act, row, width, (first + base) / ACT_BLOCK, v);
    }
}
