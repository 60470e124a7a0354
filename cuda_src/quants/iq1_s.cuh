// IQ1_S: 256 elements in 50 bytes.
//
//   0      2        34          50
//   | d f16 | qs[32] | u16 qh[8] |
//
// 8 elements: code = a byte of qs and three bits of qh. Sub-block b of 32: of qh[b], bits 3 i.. belong to code i, bits
// 12.. are the step s, bit 15 the sign of the shift: d * (2 s + 1) * (level +- 1/8), in eighths. A piece is a sub-block.
#pragma once

#include "common/dot.cuh"
#include "quants/grid.cuh"

struct iq1_s {
    static constexpr int BLOCK = 256, BYTES = 50;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = true;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 qs[1];
        u32 high;
        u32 d;
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        int b = piece & 7;
        r.d = load_u16(block);
        load_words(block + 2 + 4 * b, r.qs);
        r.high = load_u16(block + 34 + 2 * b);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 code = ((r.qs[0] >> (8 * i)) & 255u) | (((r.high >> (3 * i)) & 7u) << 8);
            shifted_group(__ldg(iq1_s_grid + code), r.high & 0x8000u, w.q + 2 * i);
        }
        w.scale[0] = w.scale[1] = half_bits_to_float(r.d) * 0.125f * (float)(2 * ((r.high >> 12) & 7u) + 1);
    }
};
