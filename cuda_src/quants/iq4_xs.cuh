// IQ4_XS: 256 elements in 136 bytes.
//
//   0      2              4             8         136
//   | d f16 | scales_h u16 | scales_l[4] | qs[128] |
//
// Sub-block k of 32: scale = nibble (k % 2) of scales_l[k / 2] + 16 * (bits 2 k.. of scales_h) - 32; nibbles of
// qs[16 k..] as in IQ4_NL: d * scale * table[q]. A piece is a sub-block.
#pragma once

#include "common/dot.cuh"
#include "quants/bits.cuh"

struct iq4_xs {
    static constexpr int BLOCK = 256, BYTES = 136;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = true;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 head[2];
        u32 qs[4];
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        load_words8(block, r.head);
        load_words8(block + 8 + 16 * (piece & 7), r.qs);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        const u32 table[4] = IQ4_TABLE;
        int k = piece & 7;
        u32 low = (r.head[1] >> (4 * k)) & 15u, high = (r.head[0] >> (16 + 2 * k)) & 3u;
#pragma unroll
        for (int i = 0; i < 4; i++) lookup_nibbles(r.qs[i], table, w.q[i], w.q[4 + i]);
        w.scale[0] = w.scale[1] = half_bits_to_float(r.head[0] & 0xffffu) * (float)((int)(low | (high << 4)) - 32);
    }
};
