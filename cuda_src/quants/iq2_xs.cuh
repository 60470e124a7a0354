// IQ2_XS: 256 elements in 74 bytes.
//
//   0      2             66          74
//   | d f16 | u16 qs[32] | scales[8] |
//
// A u16 stands for 8 elements: 9 bits of code, 7 bits of sign index; nibble j % 2 of scales[j / 2] is the step s of 16
// elements: d / 8 * (2 s + 1) * level * sign. A piece is 32 elements, four of the u16.
#pragma once

#include "common/dot.cuh"
#include "quants/grid.cuh"

struct iq2_xs {
    static constexpr int BLOCK = 256, BYTES = 74;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = false;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 qs[2];
        u32 scales;
        u32 d;
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        int b = piece & 7;
        r.d = load_u16(block);
        load_words(block + 2 + 8 * b, r.qs);
        r.scales = load_u8(block + 66 + b);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        const u32 levels[2] = IQ2_XS_LEVELS;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 word = r.qs[i >> 1] >> (16 * (i & 1));
            signed_group(__ldg(iq2_xs_grid + (word & 511u)), levels, even_signs(word >> 9), w.q + 2 * i);
        }
#pragma unroll
        for (int g = 0; g < 2; g++)
            w.scale[g] = half_bits_to_float(r.d) * 0.125f * (float)(2 * ((r.scales >> (4 * g)) & 15u) + 1);
    }
};
