// IQ3_S: 256 elements in 110 bytes.
//
//   0      2        66      74          106         110
//   | d f16 | qs[64] | qh[8] | signs[32] | scales[4] |
//
// 4 elements: code = a byte of qs and a bit of qh; a bit of signs each; nibble b % 2 of scales[b / 2] is the step s of
// sub-block b of 32: d * (2 s + 1) * level * sign. A piece is a sub-block.
#pragma once

#include "common/dot.cuh"
#include "quants/grid.cuh"

struct iq3_s {
    static constexpr int BLOCK = 256, BYTES = 110;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = true;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 qs[2];
        u32 signs[1];
        u32 high;
        u32 scales;
        u32 d;
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        int b = piece & 7;
        r.d = load_u16(block);
        load_words(block + 2 + 8 * b, r.qs);
        load_words(block + 74 + 4 * b, r.signs);
        r.high = load_u8(block + 66 + b);
        r.scales = load_u8(block + 106 + (b >> 1));
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        const u32 levels[2] = IQ3_S_LEVELS;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 code = ((r.qs[i >> 2] >> (8 * (i & 3))) & 255u) | (((r.high >> i) & 1u) << 8);
            w.q[i] = with_signs(grid_levels(__ldg(iq3_s_grid + code), levels, 0), r.signs[0] >> (4 * i));
        }
        u32 step = (r.scales >> (4 * (piece & 1))) & 15u;
        w.scale[0] = w.scale[1] = half_bits_to_float(r.d) * (float)(2 * step + 1);
    }
};
