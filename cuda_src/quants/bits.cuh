// Bits and table look-ups that several formats share.
#pragma once

#include "common/types.cuh"

// Bits 0..3 of `bits` to bit 4 of the four bytes of a word.
__device__ __forceinline__ u32 spread_to_bit4(u32 bits) {
    // The factor puts bit i at 8 i + 4 (i = 0: shift 4, then 11, 18, 25); the mask drops the other products.
    return ((bits & 0xfu) * 0x02040810u) & 0x10101010u;
}

// The eight nibbles of x through a table of 16 signed bytes: `lo` gets those of the low nibbles, `hi` of the high ones.
// A byte permutation selects among eight bytes by three bits; a second one decides by the fourth bit.
__device__ __forceinline__ void lookup_nibbles(u32 x, const u32 (&table)[4], u32& lo, u32& hi) {
    u32 three = x & 0x77777777u, fourth = ((x & 0x88888888u) >> 1) | 0x32103210u;
    u32 a = __byte_perm(table[0], table[1], three), b = __byte_perm(table[2], table[3], three);
    u32 c = __byte_perm(table[0], table[1], three >> 16), d = __byte_perm(table[2], table[3], three >> 16);
    u32 first = __byte_perm(a, b, fourth), second = __byte_perm(c, d, fourth >> 16);
    lo = __byte_perm(first, second, 0x6420);
    hi = __byte_perm(first, second, 0x7531);
}

// The non-linear levels of IQ4_NL and IQ4_XS:
// -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
#define IQ4_TABLE {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}

// 6-bit scales and minima of sub-blocks 2 j and 2 j + 1 of Q4_K and Q5_K; s = the 12 packed bytes. Byte 0 and 1 of
// `scales` and of `mins`.
__device__ __forceinline__ void k_scales(u32 s0, u32 s1, u32 s2, int j, u32& scales, u32& mins) {
    int shift = 16 * (j & 1);
    u32 a = s0 >> shift, b = s1 >> shift, c = s2 >> shift;
    scales = j < 2 ? a & 0x3f3fu : (c & 0x0f0fu) | ((a & 0xc0c0u) >> 2);
    mins = j < 2 ? b & 0x3f3fu : ((c >> 4) & 0x0f0fu) | ((b & 0xc0c0u) >> 2);
}
