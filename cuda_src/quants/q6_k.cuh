// Q6_K: 256 elements in 210 bytes.
//
//   0         128      192             208    210
//   | ql[128] | qh[64] | scales i8[16] | d f16 |
//
// Element e: h = e / 128, j = e % 128 / 32, l = e % 32: low bits = nibble (j / 2) of ql[64 h + l + 32 (j % 2)], high bits
// at 2 j of qh[32 h + l]; d * scales[e / 16] * (q - 32). A piece: 16 bytes of ql, both nibbles: j and j + 2.
#pragma once

#include "common/dot.cuh"

struct q6_k {
    static constexpr int BLOCK = 256, BYTES = 210;
    static constexpr bool IS_FLOAT = false, OFFSET = false, ONE_BLOCK = false;
    static constexpr bool PAIRED = false;
    static constexpr int ORDER = 2;
    static constexpr float POST = 1.0f;

    struct Raw {
        u32 ql[4];
        u32 qh[4];
        u32 scales;  // of group 0 and, in the next byte, of group 1
        u32 d;
    };

    static __device__ __forceinline__ void load(const u8* row, int piece, Raw& r) {
        const u8* block = row + (piece >> 3) * BYTES;
        int half = (piece >> 2) & 1, unit = piece & 3;
        load_vectors(block + 64 * half + 16 * unit, r.ql);
        load_vectors(block + 128 + 32 * half + 16 * (unit & 1), r.qh);
        const u8* scales = block + 192 + 8 * half + unit;
        r.scales = load_u8(scales) | (load_u8(scales + 4) << 8);
        r.d = load_u16(block + 208);
    }

    static __device__ __forceinline__ int group(int piece, int g) {
        return (piece >> 2) * 128 + 16 * (piece & 3) + 64 * g;
    }

    static __device__ __forceinline__ void unpack(const Raw& r, int piece, Piece& w) {
        int shift = piece & 2;  // 2 j, and 2 j + 4 for the high nibbles
        float d = half_bits_to_float(r.d);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 high = r.qh[i] >> shift;
            w.q[i] = minus_bytes((r.ql[i] & 0x0f0f0f0fu) | ((high & 0x03030303u) << 4), 32);
            w.q[4 + i] = minus_bytes(((r.ql[i] >> 4) & 0x0f0f0f0fu) | (high & 0x30303030u), 32);
        }
#pragma unroll
        for (int g = 0; g < 2; g++) w.scale[g] = d * (float)(i8)(r.scales >> (8 * g));
    }
};

// 64 weights: pieces u and u + 2 of a block's half, which share qh. Group i has bits 2 i of qh, low (0, 1) and high (2, 3)
// nibbles of the two pieces.
struct WideQ6 {
    u32 ql[8];
    u32 qh[4];
    u32 scales;  // a byte a group
    u32 d;

    __device__ __forceinline__ void load(const u8* row, int span) {
        const u8* block = row + (span >> 2) * q6_k::BYTES;
        int half = (span >> 1) & 1, unit = span & 1;
        u32 offset = (u32)(u64)block & 15u, low[4], high[4], s[2];  // equal for all: the others lie multiples of 16 behind
        const u8* aligned = aligned_down<16>(block) + 16 * unit;
        load_vectors(aligned + 64 * half, offset, low);
        load_vectors(aligned + 64 * half + 32, offset, high);
        load_vectors(aligned + 128 + 32 * half, offset, qh);
        load_words(aligned_down<4>(block) + 192 + 8 * half, (offset & 3u) * 8u, s);
        d = load_u16(block + 208);
        scales = __byte_perm(s[0], s[1], unit ? 0x7531 : 0x6420);
#pragma unroll
        for (int i = 0; i < 4; i++) ql[i] = low[i], ql[4 + i] = high[i];
    }
};

template <>
struct Dots<q6_k> {
    static constexpr int PIECES = 2, BIAS = 32;
    typedef WideQ6 Raw;
    static __device__ __forceinline__ int piece(int span, int i) { return (span >> 1) * 4 + (span & 1) + 2 * i; }
    static __device__ __forceinline__ void load(const u8* row, int span, Raw& r) { r.load(row, span); }

    static __device__ __forceinline__ void unpack(const Raw& r, int, Piece (&w)[2]) {
        float d = half_bits_to_float(r.d);
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 low = r.ql[4 * i + j], high = r.qh[j];
                w[i].q[j] = (low & 0x0f0f0f0fu) | ((high << (4 - 2 * i)) & 0x30303030u);
                w[i].q[4 + j] = ((low >> 4) & 0x0f0f0f0fu) | ((high >> (2 * i)) & 0x30303030u);
            }
#pragma unroll
            for (int g = 0; g < 2; g++) w[i].scale[g] = d * (float)(i8)(r.scales >> (8 * (i + 2 * g)));
        }
    }
};
