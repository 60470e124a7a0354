// IQ2_XXS: 256 elements in 66 bytes.
//
//   0      2
//   | d f16 | 8 x (codes u8[4], u32) |
//
// Sub-block b of 32: code i stands for 8 elements of the grid; of the u32, bits 7 i.. are their sign index, bits 28..
// the step s: d / 8 * (2 s + 1) * level * sign. A piece is a sub-block.
#pragma once

#include "common/dot.cuh"
#include "quants/grid.cuh"

struct iq2_xxs {
    static constexpr int BLOCK = 256, BYTES = 66;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = true;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 qs[2];
        u32 d;
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        int b = piece & 7;
        r.d = load_u16(block);
        load_words(block + 2 + 8 * b, r.qs);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        const u32 levels[2] = IQ2_XXS_LEVELS;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 selectors = __ldg(iq2_xxs_grid + ((r.qs[0] >> (8 * i)) & 255u));
            signed_group(selectors, levels, even_signs(r.qs[1] >> (7 * i)), w.q + 2 * i);
        }
        w.scale[0] = w.scale[1] = half_bits_to_float(r.d) * 0.125f * (float)(2 * (r.qs[1] >> 28) + 1);
    }
};
