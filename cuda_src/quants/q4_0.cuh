// Q4_0: 32 elements in 18 bytes.
//
//   0      2                 18
//   | d f16 | 16 x (lo, hi)  |     lo = elements 0..15, hi = elements 16..31;  d * (q - 8)
#pragma once

#include "common/dot.cuh"

struct q4_0 {
    static constexpr int BLOCK = 32, BYTES = 18;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = true;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 qs[4];
        u32 d;
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + piece * BYTES;
        r.d = load_u16(block);
        load_vectors(block + 2, r.qs);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w.q[i] = minus_bytes(r.qs[i] & 0x0f0f0f0fu, 8);
            w.q[4 + i] = minus_bytes((r.qs[i] >> 4) & 0x0f0f0f0fu, 8);
        }
        w.scale[0] = w.scale[1] = half_bits_to_float(r.d);
    }
};
