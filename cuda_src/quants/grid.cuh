// What the formats made of grids share: groups of weights by code, and their signs.
//
// quants/grids.cuh has an array of selectors and a list of levels for each grid; rimuru/ops/cuda/grids.py writes it, and
// the loader puts it in.
#pragma once

#include "quants/grids.cuh"

// Weights 4 h .. 4 h + 3 of the group with these selectors.
__device__ __forceinline__ u32 grid_levels(u32 selectors, const u32 (&levels)[2], int h) {
    return __byte_perm(levels[0], levels[1], selectors >> (16 * h));
}

// Four positive bytes, negated where bit 0..3 of `signs` is set: ~level + 1, which carries into no other byte.
__device__ __forceinline__ u32 with_signs(u32 bytes, u32 signs) {
    u32 ones = ((signs & 15u) * 0x00204081u) & 0x01010101u;
    return (bytes ^ (ones * 255u)) + ones;
}

// The eight signs of a 7-bit sign index: the last one makes the number of set bits even.
__device__ __forceinline__ u32 even_signs(u32 index) {
    index &= 127u;
    return index | ((__popc(index) & 1u) << 7);
}

// Eight weights into two words.
__device__ __forceinline__ void signed_group(u32 selectors, const u32 (&levels)[2], u32 signs, u32* q) {
    q[0] = with_signs(grid_levels(selectors, levels, 0), signs);
    q[1] = with_signs(grid_levels(selectors, levels, 1), signs >> 4);
}

// IQ1: eight times the levels -1, 0, 1 (in this order in the grid), plus one, or minus one if `negative`. Bytes are raised
// by 16 for the sum.
__device__ __forceinline__ void shifted_group(u32 selectors, bool negative, u32* q) {
    const u32 levels[2] = {0x00181008u, 0u};
    u32 shift = negative ? 0u - 0x01010101u : 0x01010101u;
#pragma unroll
    for (int h = 0; h < 2; h++) q[h] = minus_bytes(grid_levels(selectors, levels, h) + shift, 16);
}
