// F16: plain numbers. Rows start at multiples of 16 bytes.
#pragma once

#include "common/types.cuh"

struct f16 {
    static constexpr int BLOCK = 1, BYTES = 2;
    static constexpr bool IS_FLOAT = true, OFFSET = false, ONE_BLOCK = true;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 0;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 words[16];
    };

    // Elements 0..7 at p.
    static __device__ __forceinline__ void load8(const u8* p, float (&v)[8]) {
        u32 w[4];
        load_words16(p, w);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[2 * i] = half_bits_to_float(w[i] & 0xffffu);
            v[2 * i + 1] = half_bits_to_float(w[i] >> 16);
        }
    }

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        load_words16(row + piece * 64, r.words);
    }

    static __device__ __forceinline__ int group(int piece, int g) { return piece * 32 + g * 16; }

    // Elements 2 i and 2 i + 1 of the piece.
    static __device__ __forceinline__ float2 pair(const Raw& r, int i) {
        return make_float2(half_bits_to_float(r.words[i] & 0xffffu), half_bits_to_float(r.words[i] >> 16));
    }
};
