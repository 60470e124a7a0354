// Q5_1: 32 elements in 24 bytes.
//
//   0      2       4        8                 24
//   | d f16 | m f16 | qh u32 | 16 x (lo, hi)  |     bit e of qh is bit 4 of element e;  d * q + m
#pragma once

#include "common/dot.cuh"
#include "quants/bits.cuh"

struct q5_1 {
    static constexpr int BLOCK = 32, BYTES = 24;
    static constexpr bool IS_FLOAT = false, OFFSET = true, ONE_BLOCK = true;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 words[6];  // d and m, qh, qs
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        load_words8(row + piece * BYTES, r.words);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        u32 high = r.words[1];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w.q[i] = (r.words[2 + i] & 0x0f0f0f0fu) | spread_to_bit4(high >> (4 * i));
            w.q[4 + i] = ((r.words[2 + i] >> 4) & 0x0f0f0f0fu) | spread_to_bit4(high >> (16 + 4 * i));
        }
        w.scale[0] = w.scale[1] = half_bits_to_float(r.words[0] & 0xffffu);
        w.offset[0] = w.offset[1] = half_bits_to_float(r.words[0] >> 16);
    }
};
