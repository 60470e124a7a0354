// Q2_K: 256 elements in 84 bytes.
//
//   0            16          80      82         84
//   | scales[16] | qs[64]   | d f16 | dmin f16 |
//
// Element e: h = e / 128, j = e % 128 / 32, l = e % 32: q = bits 2j.. of qs[32 h + l]; s = scales[e / 16];
// d * (s & 15) * q - dmin * (s >> 4). A piece: 16 bytes of qs (h, upper half of l or not), two of the four j.
#pragma once

#include "common/dot.cuh"

struct q2_k {
    static constexpr int BLOCK = 256, BYTES = 84;
    static constexpr bool IS_FLOAT = false, OFFSET = true, ONE_BLOCK = false;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 3;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 qs[4];
        u32 scales;  // of group 0 and, in the next byte, of group 1
        u32 dm;
    };

    static __device__ __forceinline__ int first_scale(int piece) {
        int unit = (piece >> 1) & 3;
        return 8 * (unit >> 1) + 4 * (piece & 1) + (unit & 1);
    }

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        int s = first_scale(piece);
        r.dm = load_u32(block + 80);
        r.scales = load_u8(block + s) | (load_u8(block + s + 2) << 8);
        load_words4(block + 16 + 16 * ((piece >> 1) & 3), r.qs);
    }

    static __device__ __forceinline__ int group(int piece, int g) {
        return (piece >> 3) * 256 + 16 * (first_scale(piece) + 2 * g);
    }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        int shift = 4 * (piece & 1);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 v = r.qs[i] >> shift;
            w.q[i] = v & 0x03030303u;
            w.q[4 + i] = (v >> 2) & 0x03030303u;
        }
        float d = half_bits_to_float(r.dm & 0xffffu), dmin = half_bits_to_float(r.dm >> 16);
#pragma unroll
        for (int g = 0; g < 2; g++) {
            u32 s = r.scales >> (8 * g);
            w.scale[g] = d * (float)(s & 15u);
            w.offset[g] = -dmin * (float)((s >> 4) & 15u);
        }
    }
};
