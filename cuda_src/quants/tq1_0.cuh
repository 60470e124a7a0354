// TQ1_0: 256 elements in 54 bytes.
//
//   0        48      52     54
//   | qs[48] | qh[4] | d f16 |
//
// Ternary digits, five a byte: digit i of byte v is 3 * (v * 3^i mod 256) / 256. Sub-blocks 0..4 of 32 are digits 0..4
// of qs[0..31]; then runs of 16 are digits 0..4 of qs[32..47], and runs of 4 digits 0..3 of qh. d * (digit - 1). A piece
// is a sub-block.
#pragma once

#include "common/dot.cuh"

// Digit i of four bytes, each in its byte.
__device__ __forceinline__ u32 ternary_digits(u32 bytes, int i) {
    u32 power = i < 4 ? (0x1b090301u >> (8 * i)) & 255u : 81u;  // 3^i
    u32 even = ((bytes & 0x00ff00ffu) * power) & 0x00ff00ffu;
    u32 odd = (((bytes >> 8) & 0x00ff00ffu) * power) & 0x00ff00ffu;
    return (((even * 3u) >> 8) & 0x00ff00ffu) | ((odd * 3u) & 0xff00ff00u);
}

struct tq1_0 {
    static constexpr int BLOCK = 256, BYTES = 54;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = true;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 qs[8];  // 8 words of qs, or 4 of qs and qh
        u32 d;
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        int b = piece & 7;
        if (b < 5) {
            load_vectors(block, r.qs);
        } else {
            u32 tail[5];
            load_words(block + 32, tail);
#pragma unroll
            for (int i = 0; i < 5; i++) r.qs[i] = tail[i];
        }
        r.d = load_u16(block + 52);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        int b = piece & 7;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int run = 2 * (b - 5) + (i >> 2);  // of 16 elements, for b > 4
            int digit = b < 5 ? b : run < 5 ? run : i & 3;
            u32 bytes = b < 5 ? r.qs[i] : run < 5 ? r.qs[i & 3] : r.qs[4];
            w.q[i] = minus_bytes(ternary_digits(bytes, digit), 1);
        }
        w.scale[0] = w.scale[1] = half_bits_to_float(r.d);
    }
};
