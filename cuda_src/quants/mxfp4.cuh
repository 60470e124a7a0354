// MXFP4: 32 elements in 17 bytes.
//
//   0      1                 17
//   | e u8 | 16 x (lo, hi)   |     lo = elements 0..15, hi = elements 16..31;  2^(e - 127) * level[q]
//
// The levels 0 .5 1 1.5 2 3 4 6 and their negatives are stored doubled, so the scale is 2^(e - 128). For e < 2 that is
// below float32's normal range, which the compiler flushes to zero: scale[] holds 2^(e - 126), POST the missing 1/4.
#pragma once

#include "common/dot.cuh"
#include "quants/bits.cuh"

struct mxfp4 {
    static constexpr int BLOCK = 32, BYTES = 17;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = true;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 0.25f;

    struct Raw {
        u32 qs[4];
        u32 e;
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + piece * BYTES;
        r.e = load_u8(block);
        load_vectors(block + 1, r.qs);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        const u32 table[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
#pragma unroll
        for (int i = 0; i < 4; i++) lookup_nibbles(r.qs[i], table, w.q[i], w.q[4 + i]);
        // Exponents above 253 would be infinite (or NaN times zero): no weight has them.
        w.scale[0] = w.scale[1] = __uint_as_float(min(r.e + 1u, 254u) << 23);
    }
};
