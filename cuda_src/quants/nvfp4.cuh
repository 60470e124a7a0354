// NVFP4: 64 elements in 36 bytes.
//
//   0           4        36
//   | scales[4] | qs[32] |
//
// 16 elements: an unsigned 8-bit float (4 bits of exponent with bias 7, 3 of mantissa; 0x7f is zero), and 8 bytes of qs:
// low nibbles are elements 0..7, high ones 8..15: scale * level[q], levels as in MXFP4, stored doubled. A piece is half a
// block. The factor of the whole tensor is no part of the rows.
#pragma once

#include "common/dot.cuh"
#include "quants/bits.cuh"

// Half the value of a scale byte. The exponent byte of 2^(e - 7) / 2 is e + 119.
__device__ __forceinline__ float half_of_ue4m3(u32 code) {
    u32 exponent = (code >> 3) & 15u, mantissa = code & 7u;
    float normal = __uint_as_float(((exponent + 119u) << 23) | (mantissa << 20));
    float value = exponent ? normal : (float)mantissa * 0.0009765625f;
    return code == 0x7fu ? 0.0f : value;
}

struct nvfp4 {
    static constexpr int BLOCK = 64, BYTES = 36;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = false;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 qs[4];
        u32 scales;
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 1) * BYTES;
        int b = piece & 1;
        r.scales = load_u16(block + 2 * b);
        load_words(block + 4 + 16 * b, r.qs);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        const u32 table[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int at = 4 * (i >> 1) + (i & 1);
            lookup_nibbles(r.qs[i], table, w.q[at], w.q[at + 2]);
        }
#pragma unroll
        for (int g = 0; g < 2; g++) w.scale[g] = half_of_ue4m3((r.scales >> (8 * g)) & 255u);
    }
};
