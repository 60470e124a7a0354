// Making the 8-bit form of activations (types.cuh has the layout): a warp handles one block, a lane one element.
#pragma once

#include "common/types.cuh"
#include "common/warp.cuh"

// Pointers to the 8-bit form of all rows; `values` null = the row is not wanted in this form.
struct ActOut {
    i8* values;     // [T, W]
    float* scales;  // [T, W / 32]
    int* sums;      // [T, W / 32]
};

// The 32 values of a warp's lanes become block `block` of row `row`. All lanes take part.
__device__ __forceinline__ void store_act_block(const ActOut& out, i64 row, int width, int block, float v) {
    int lane = threadIdx.x & 31;
    float largest = warp_max(fabsf(v));
    // Below 1e-30 the quotient would overflow; such a block is zero beside anything a model computes with.
    float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
    int q = __float2int_rn(v * inverse);
    int sum = q;
#pragma unroll
    for (int offset = 8; offset > 0; offset >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    int upper = __shfl_sync(FULL_WARP, sum, 16);
    out.values[row * width + block * ACT_BLOCK + lane] = (i8)q;
    if (lane == 0) {
        i64 at = row * (width / ACT_BLOCK) + block;
        out.scales[at] = inverse > 0.0f ? largest * (1.0f / 127.0f) : 0.0f;
        out.sums[at] = (sum & 0xffff) | (upper << 16);
    }
}
