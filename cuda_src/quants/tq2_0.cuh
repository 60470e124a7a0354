// TQ2_0: 256 elements in 66 bytes.
//
//   0        64     66
//   | qs[64] | d f16 |
//
// Element e: h = e / 128, j = e % 128 / 32, l = e % 32: q = bits 2 j.. of qs[32 h + l]; d * (q - 1). A piece is 32 elements.
#pragma once

#include "common/dot.cuh"

struct tq2_0 {
    static constexpr int BLOCK = 256, BYTES = 66;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = true;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 qs[8];
        u32 d;
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        int b = piece & 7;
        load_vectors(block + 32 * (b >> 2), r.qs);
        r.d = load_u16(block + 64);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
#pragma unroll
        for (int i = 0; i < 8; i++) w.q[i] = minus_bytes((r.qs[i] >> (2 * (piece & 3))) & 0x03030303u, 1);
        w.scale[0] = w.scale[1] = half_bits_to_float(r.d);
    }
};
