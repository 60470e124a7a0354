// IQ3_XXS: 256 elements in 98 bytes.
//
//   0      2        66        98
//   | d f16 | qs[64] | u32[8] |
//
// A code stands for 4 elements. Sub-block b of 32: of its u32, bits 7 i.. are the sign index of 8 elements, bits 28.. the
// step s: d / 4 * (2 s + 1) * level * sign. A piece is a sub-block.
#pragma once

#include "common/dot.cuh"
#include "quants/grid.cuh"

struct iq3_xxs {
    static constexpr int BLOCK = 256, BYTES = 98;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = true;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 qs[2];
        u32 signs[1];
        u32 d;
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        int b = piece & 7;
        r.d = load_u16(block);
        load_words(block + 2 + 8 * b, r.qs);
        load_words(block + 66 + 4 * b, r.signs);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        const u32 levels[2] = IQ3_XXS_LEVELS;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 selectors = __ldg(iq3_xxs_grid + ((r.qs[i >> 2] >> (8 * (i & 3))) & 255u));
            u32 signs = even_signs(r.signs[0] >> (7 * (i >> 1)));
            w.q[i] = with_signs(grid_levels(selectors, levels, 0), signs >> (4 * (i & 1)));
        }
        w.scale[0] = w.scale[1] = half_bits_to_float(r.d) * 0.25f * (float)(2 * (r.signs[0] >> 28) + 1);
    }
};
