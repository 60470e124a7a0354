// Q3_K: 256 elements in 110 bytes.
//
//   0           32       96           108     110
//   | hmask[32] | qs[64] | scales[12] | d f16 |
//
// Element e: h = e / 128, j = e % 128 / 32, l = e % 32: q = bits 2j.. of qs[32 h + l], plus 4 if bit 4 h + j of hmask[l];
// d * (scale - 32) * (q - 4). 6-bit scale i: low bits in nibble i / 8 of scales[i % 8], high bits at 2 (i / 4) of
// scales[8 + i % 4]. A piece: 16 bytes of qs, two of the four j.
#pragma once

#include "common/dot.cuh"

struct q3_k {
    static constexpr int BLOCK = 256, BYTES = 110;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = false;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 3;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 qs[4];
        u32 high[4];
        u32 d;
        u32 low_bits, high_bits;  // packed scales of group 0 and, in the next byte, of group 1
    };

    static __device__ __forceinline__ int first_scale(int piece) {
        int unit = (piece >> 1) & 3;
        return 8 * (unit >> 1) + 4 * (piece & 1) + (unit & 1);
    }

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        int unit = (piece >> 1) & 3, s = first_scale(piece);
        load_vectors(block + 32 + 16 * unit, r.qs);
        load_vectors(block + 16 * (unit & 1), r.high);
        r.d = load_u16(block + 108);
        const u8* scales = block + 96;
        r.low_bits = load_u8(scales + (s & 7)) | (load_u8(scales + ((s + 2) & 7)) << 8);
        r.high_bits = load_u8(scales + 8 + (s & 3)) | (load_u8(scales + 8 + ((s + 2) & 3)) << 8);
    }

    static __device__ __forceinline__ int group(int piece, int g) {
        return (piece >> 3) * 256 + 16 * (first_scale(piece) + 2 * g);
    }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        int half = (piece >> 2) & 1, j = 2 * (piece & 1), s = first_scale(piece);
        float d = half_bits_to_float(r.d);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 v = r.qs[i] >> (2 * j), bit = r.high[i] >> (4 * half + j);
            w.q[i] = minus_bytes((v & 0x03030303u) | ((bit & 0x01010101u) << 2), 4);
            w.q[4 + i] = minus_bytes(((v >> 2) & 0x03030303u) | (((bit >> 1) & 0x01010101u) << 2), 4);
        }
#pragma unroll
        for (int g = 0; g < 2; g++) {
            int i = s + 2 * g;
            u32 low = (r.low_bits >> (8 * g + 4 * (i >> 3))) & 15u, high = (r.high_bits >> (8 * g + 2 * (i >> 2))) & 3u;
            w.scale[g] = d * (float)((int)(low | (high << 4)) - 32);
        }
    }
};
