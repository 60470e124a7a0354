// Logits as integers of the same order.
#pragma once
#include "common/types.cuh"
#include "common/warp.cuh"

__device__ __forceinline__ unsigned key_of(float l) {
    unsigned bits = __float_as_uint(l);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The larger logit; of equal ones, the lower id: as one integer, the key above the inverted id.
__device__ __forceinline__ u64 rank_of(float l, int id) { return ((u64)key_of(l) << 32) | (unsigned)~id; }
