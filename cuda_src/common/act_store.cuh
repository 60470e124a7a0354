// Storing an activation row in float32 and, where matrices read it, in 8-bit blocks (types.cuh has their layout).
#pragma once
#include "common/types.cuh"
#include "common/warp.cuh"

// The 8-bit form of all rows; `values` null = not wanted.
struct ActOut {
    i8* values;     // [T, W]
    float* scales;  // [T, W / 32]
    int* sums;      // [T, W / 32]
};

#define ACT_PARAMETERS i8 *act_values, float *act_scales, int *act_sums
#define ACT_ARGUMENTS (ActOut{act_values, act_scales, act_sums})

// The 32 values of a warp's lanes become block `block` of row `row`. All lanes take part.
__device__ __forceinline__ void store_act_block(const ActOut& out, i64 row, int width, int block, float v) {
    int lane = threadIdx.x & 31;
    // Magnitudes as integers have the same order; what is no number does not count.
    float largest = __uint_as_float(__reduce_max_sync(FULL_WARP, v == v ? __float_as_uint(fabsf(v)) : 0u));
    // Below 1e-30 the quotient would overflow; such a block is zero beside anything a model computes with.
    float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
    int q = __float2int_rn(v * inverse);
    int lower = __reduce_add_sync(FULL_WARP, lane < 16 ? q : 0), upper = __reduce_add_sync(FULL_WARP, lane < 16 ? 0 : q);
    i64 at = row * (width / ACT_BLOCK) + block;
    out.values[at * ACT_BLOCK + lane] = (i8)q;
    if (lane == 0) {
        out.scales[at] = inverse > 0.0f ? largest * (1.0f / 127.0f) : 0.0f;
        out.sums[at] = (lower & 0xffff) | (upper << 16);
    }
}

// A warp stores 32 neighbouring columns, lane i column c of row `row`. For the 8-bit form (act.values given) the first
// lane's column is a multiple of 32 and all lanes are inside.
__device__ __forceinline__ void store_column(float* out_row, const ActOut& act, i64 row, int width, int c, bool inside, float v) {
    if (inside) out_row[c] = v;
    if (act.values) store_act_block(act, row, width, c / ACT_BLOCK, v);
}

// The block stores columns first .. first + part of a row of `width`; value(c) gives column first + c.
template <typename Value>
__device__ __forceinline__ void store_row(float* out_row, const ActOut& act, i64 row, int width, int first, int part,
                                          Value value) {
    int lane = threadIdx.x & 31;
    for (int base = threadIdx.x - lane; base < part; base += blockDim.x) {
        int c = base + lane;
        store_column(out_row, act, row, width, first + c, c < part, c < part ? value(c) : 0.0f);
    }
}
