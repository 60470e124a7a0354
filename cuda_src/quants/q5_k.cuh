// Q5_K: 256 elements in 176 bytes.
//
//   0      2          4            16       48         176
//   | d f16 | dmin f16 | scales[12] | qh[32] | qs[128] |
//
// Element e: k = e / 32, l = e % 32: nibble (k % 2) of qs[32 (k / 2) + l], bit k of qh[l] is bit 4; scales as in Q4_K.
#pragma once

#include "common/dot.cuh"
#include "quants/bits.cuh"

struct q5_k {
    static constexpr int BLOCK = 256, BYTES = 176;
    static constexpr bool IS_FLOAT = false, OFFSET = true, ONE_BLOCK = false;
    static constexpr bool PAIRED = true;
    static constexpr int ORDER = 1;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 head[4];
        u32 high[4];
        u32 qs[4];
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        load_words16(block, r.head);
        load_words16(block + 16 + 16 * (piece & 1), r.high);
        load_words16(block + 48 + 16 * (piece & 7), r.qs);
    }

    // The piece after an even one, whose head is known.
    static __device__ __forceinline__ void load_second(const u8* row, int piece, const Raw& first, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
#pragma unroll
        for (int i = 0; i < 4; i++) r.head[i] = first.head[i];
        load_words16(block + 16 + 16 * (piece & 1), r.high);
        load_words16(block + 48 + 16 * (piece & 7), r.qs);
    }

    static __device__ __forceinline__ int group(int piece, int g) {
        return (piece >> 1) * 64 + 32 * g + 16 * (piece & 1);
    }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        int j = (piece >> 1) & 3;
        u32 scales, mins;
        k_scales(r.head[1], r.head[2], r.head[3], j, scales, mins);
        float d = half_bits_to_float(r.head[0] & 0xffffu), dmin = half_bits_to_float(r.head[0] >> 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 bits = r.high[i] >> (2 * j);
            w.q[i] = (r.qs[i] & 0x0f0f0f0fu) | ((bits & 0x01010101u) << 4);
            w.q[4 + i] = ((r.qs[i] >> 4) & 0x0f0f0f0fu) | ((bits & 0x02020202u) << 3);
        }
#pragma unroll
        for (int g = 0; g < 2; g++) {
            w.scale[g] = d * (float)((scales >> (8 * g)) & 0xffu);
            w.offset[g] = -dmin * (float)((mins >> (8 * g)) & 0xffu);
        }
    }
};
