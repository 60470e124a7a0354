// IQ1_M: 256 elements in 56 bytes.
//
//   0        32       48             56
//   | qs[32] | qh[16] | u16 scales[4] |
//
// 8 elements: code = a byte of qs and three bits of a nibble of qh, whose last bit is the sign of the shift. Bits 3 (j % 4)
// of scales[j / 4] are the step s of 16 elements; the top nibbles of the scales make up the f16 d:
// d * (2 s + 1) * (level +- 1/8), in eighths. A piece is 32 elements.
#pragma once

#include "common/dot.cuh"
#include "quants/grid.cuh"

struct iq1_m {
    static constexpr int BLOCK = 256, BYTES = 56;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = false;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 qs[1];
        u32 high;
        u32 scales[2];
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        int b = piece & 7;
        load_words(block + 4 * b, r.qs);
        r.high = load_u16(block + 32 + 2 * b);
        load_words(block + 48, r.scales);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 nibble = r.high >> (4 * i);
            u32 code = ((r.qs[0] >> (8 * i)) & 255u) | ((nibble & 7u) << 8);
            shifted_group(__ldg(iq1_s_grid + code), nibble & 8u, w.q + 2 * i);
        }
        u32 low = r.scales[0], high = r.scales[1];
        u32 d = ((low >> 12) & 15u) | ((low >> 24) & 0xf0u) | ((high >> 4) & 0xf00u) | ((high >> 16) & 0xf000u);
        int b = piece & 7;
        u32 steps = (b & 4 ? high : low) >> (8 * (b & 2) + 6 * (b & 1));
#pragma unroll
        for (int g = 0; g < 2; g++)
            w.scale[g] = half_bits_to_float(d) * 0.125f * (float)(2 * ((steps >> (3 * g)) & 7u) + 1);
    }
};
