// Spans (common/span.cuh) of the types whose scales are small integers times one number a block: integers times integers
// are exact in halves, or nearly so, and take one multiply-add.
//
// A half with the exponent of 2^e and an integer q in its lowest mantissa bits is 2^e + q 2^(e - 10); a multiply-add with
// the group's scale s and with -2^e s, which is exact, leaves q 2^(e - 10) s.
#pragma once

#include "common/span.cuh"
#include "quants/all.cuh"
#include "quants/bits.cuh"

__device__ __forceinline__ __half2 bits_half2(u32 bits) { return *(__half2*)&bits; }

// Byte i of x below the high bytes of two equal halves 0x6400: 1024 + byte.
__device__ __forceinline__ __half2 byte_halves(u32 x, u32 halves, int i) {
    return bits_half2(__byte_perm(x, halves, 0x5050 + 0x0101 * i));
}

template <>
struct Span<q4_k> {
    static constexpr bool SCALED = true, MINS = true;
    static constexpr u32 MAGIC = 0x64006400u;
    u32 head[4];
    u32 qs[8];

    __device__ __forceinline__ void load(const u8* row, int span, int) {
        const u8* block = row + (span >> 2) * q4_k::BYTES;
        load_words16(block, head);
        load_words16(block + 16 + 32 * (span & 3), qs);
    }

    // Groups 0 and 2: low nibbles of the first and of the last 16 bytes; 1 and 3: high nibbles.
    static __device__ __forceinline__ int first(int span, int i) { return span * 64 + 32 * (i & 1) + 16 * (i >> 1); }

    struct Halves {
        const Span& bytes;
        u32 magic;
        __half2 scales[2], offsets[2];
        u32 mins[2];
        float scale, min_scale;

        __device__ __forceinline__ Halves(const Span& stored, int span, int, u32 constant) : bytes(stored), magic(constant) {
            u32 s, m;
            k_scales(stored.head[1], stored.head[2], stored.head[3], span & 3, s, m);
            // High nibbles stay where they are in their bytes, 16 q, and meet a sixteenth of the scale.
            scales[0] = __hsub2(byte_halves(s, magic, 0), __float2half2_rn(1024.0f));
            scales[1] = __hfma2(byte_halves(s, magic, 1), __float2half2_rn(0.0625f), __float2half2_rn(-64.0f));
#pragma unroll
            for (int g = 0; g < 2; g++) {
                offsets[g] = __hmul2(scales[g], __float2half2_rn(-1024.0f));
                mins[g] = half2_bits(__hsub2(byte_halves(m, magic, g), __float2half2_rn(1024.0f)));
            }
            scale = half_bits_to_float(stored.head[0] & 0xffffu);
            min_scale = half_bits_to_float(stored.head[0] >> 16);
        }

        __device__ __forceinline__ void group(int i, u32 (&out)[8]) const {
            u32 mask = i & 1 ? 0x00f000f0u : 0x000f000fu;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                u32 x = bytes.qs[4 * (i >> 1) + w];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    __half2 q = bits_half2(((h ? x >> 8 : x) & mask) | magic);
                    out[2 * w + h] = half2_bits(__hfma2(q, scales[i & 1], offsets[i & 1]));
                }
            }
        }
        __device__ __forceinline__ u32 minimum(int i) const { return mins[i & 1]; }
    };
};

template <>
struct Span<q6_k> {
    static constexpr bool SCALED = true, MINS = false;
    static constexpr u32 MAGIC = 0x64006400u;
    WideQ6 stored;

    __device__ __forceinline__ void load(const u8* row, int span, int) { stored.load(row, span); }

    static __device__ __forceinline__ int first(int span, int i) {
        return (span >> 1) * 128 + 32 * i + 16 * (span & 1);
    }

    struct Halves {
        const WideQ6& bytes;
        u32 magic;
        u32 biased;  // scales + 128
        float scale, min_scale;

        __device__ __forceinline__ Halves(const Span& span, int, int, u32 constant)
            : bytes(span.stored),
              magic(constant),
              biased(span.stored.scales ^ 0x80808080u),
              scale(half_bits_to_float(span.stored.d)),
              min_scale(0.0f) {}

        // q in bits 2..7 of its byte is the half 1024 + 4 q: times a fourth of the scale, which is exact, and so is 288
        // times a scale.
        __device__ __forceinline__ void group(int i, u32 (&out)[8]) const {
            __half2 s = __hfma2(byte_halves(biased, magic, i), __float2half2_rn(0.25f), __float2half2_rn(-288.0f));
            __half2 offset = __hmul2(s, __float2half2_rn(-1152.0f));
#pragma unroll
            for (int w = 0; w < 4; w++) {
                u32 x = bytes.ql[4 * (i & 1) + w], nibbles = i < 2 ? x << 2 : x >> 2, top = bytes.qh[w] << (6 - 2 * i);
                u32 q = (nibbles & 0x3c3c3c3cu) | (top & 0xc0c0c0c0u);
                out[2 * w] = half2_bits(__hfma2(bits_half2(__byte_perm(q, magic, 0x5250)), s, offset));
                out[2 * w + 1] = half2_bits(__hfma2(bits_half2(__byte_perm(q, magic, 0x5351)), s, offset));
            }
        }
        __device__ __forceinline__ u32 minimum(int) const { return 0u; }
    };
};
