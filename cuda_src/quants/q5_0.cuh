// Q5_0: 32 elements in 22 bytes.
//
//   0      2        6                 22
//   | d f16 | qh u32 | 16 x (lo, hi)  |     bit e of qh is bit 4 of element e;  d * (q - 16)
#pragma once

#include "common/dot.cuh"
#include "quants/bits.cuh"

struct q5_0 {
    static constexpr int BLOCK = 32, BYTES = 22;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = true;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 words[5];  // qh, then qs
        u32 d;
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + piece * BYTES;
        r.d = load_u16(block);
        load_words(block + 2, r.words);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        u32 high = r.words[0];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 lo = (r.words[1 + i] & 0x0f0f0f0fu) | spread_to_bit4(high >> (4 * i));
            u32 hi = ((r.words[1 + i] >> 4) & 0x0f0f0f0fu) | spread_to_bit4(high >> (16 + 4 * i));
            w.q[i] = minus_bytes(lo, 16);
            w.q[4 + i] = minus_bytes(hi, 16);
        }
        w.scale[0] = w.scale[1] = half_bits_to_float(r.d);
    }
};
