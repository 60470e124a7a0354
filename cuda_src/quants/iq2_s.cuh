// IQ2_S: 256 elements in 82 bytes.
//
//   0      2        34          66      74          82
//   | d f16 | qs[32] | signs[32] | qh[8] | scales[8] |
//
// 8 elements: code = a byte of qs and two bits of qh (four codes a byte), a byte of signs; nibble j % 2 of scales[j / 2]
// is the step s of 16 elements: d / 8 * (2 s + 1) * level * sign. A piece is 32 elements.
#pragma once

#include "common/dot.cuh"
#include "quants/grid.cuh"

struct iq2_s {
    static constexpr int BLOCK = 256, BYTES = 82;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = false;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 qs[1];
        u32 signs[1];
        u32 high;
        u32 scales;
        u32 d;
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        int b = piece & 7;
        r.d = load_u16(block);
        load_words(block + 2 + 4 * b, r.qs);
        load_words(block + 34 + 4 * b, r.signs);
        r.high = load_u8(block + 66 + b);
        r.scales = load_u8(block + 74 + b);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        const u32 levels[2] = IQ2_S_LEVELS;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 code = ((r.qs[0] >> (8 * i)) & 255u) | (((r.high >> (2 * i)) & 3u) << 8);
            signed_group(__ldg(iq2_s_grid + code), levels, r.signs[0] >> (8 * i), w.q + 2 * i);
        }
#pragma unroll
        for (int g = 0; g < 2; g++)
            w.scale[g] = half_bits_to_float(r.d) * 0.125f * (float)(2 * ((r.scales >> (4 * g)) & 15u) + 1);
    }
};
