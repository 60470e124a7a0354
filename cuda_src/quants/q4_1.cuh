// Q4_1: 32 elements in 20 bytes.
//
//   0      2       4                 20
//   | d f16 | m f16 | 16 x (lo, hi)  |     lo = elements 0..15, hi = elements 16..31;  d * q + m
#pragma once

#include "common/dot.cuh"

struct q4_1 {
    static constexpr int BLOCK = 32, BYTES = 20;
    static constexpr bool IS_FLOAT = false, OFFSET = true, ONE_BLOCK = true;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 dm;
        u32 qs[4];
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + piece * BYTES;
        r.dm = load_u32(block);
        load_words4(block + 4, r.qs);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w.q[i] = r.qs[i] & 0x0f0f0f0fu;
            w.q[4 + i] = (r.qs[i] >> 4) & 0x0f0f0f0fu;
        }
        w.scale[0] = w.scale[1] = half_bits_to_float(r.dm & 0xffffu);
        w.offset[0] = w.offset[1] = half_bits_to_float(r.dm >> 16);
    }
};
