// Tensor-core fragments: f16 operands, float32 sums (mma.sync m16n8k16), and packed weights as halves.
//
// Halves of activations and of decoded weights lie in the order 0 2 1 3 of each four elements, which is the order in which
// packed bits fall out of a word: bytes 0 and 2 of it are the bytes of two 16-bit halves.
#pragma once

#include "common/async_copy.cuh"
#include "common/dot.cuh"

// Four 8 x 8 matrices of halves; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const __half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

// c += a b: a 16 x 16, b 16 x 8, c 16 x 8. Lane l holds c[l / 4][2 (l % 4) + 0, 1] and the same 8 rows below.
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 half2_bits(__half2 v) { return *(u32*)&v; }

// A piece ready to be turned into halves: its bytes unpacked, or the stored plain numbers.
template <class F>
struct HalfSource {
    Piece w;
    __device__ __forceinline__ HalfSource(const typename F::Raw& raw, int piece) { F::unpack(raw, piece, w); }

    // The 16 weights of group g.
    __device__ __forceinline__ void group(int g, u32 (&out)[8]) const {
        // A byte q + 128 below the exponent byte 0x64 is the half 1024 + 128 + q.
        const __half2 bias = __float2half2_rn(1152.0f);
        __half2 scale = __float2half2_rn(w.scale[g] * F::POST), offset = __float2half2_rn(0.0f);
        if (F::OFFSET) offset = __float2half2_rn(w.offset[g]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 bytes = w.q[4 * g + i] ^ 0x80808080u;
            u32 pair[2] = {__byte_perm(bytes, 0x64646464u, 0x4240), __byte_perm(bytes, 0x64646464u, 0x4341)};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                __half2 q = __hsub2(*(__half2*)&pair[h], bias);
                out[2 * i + h] = half2_bits(F::OFFSET ? __hfma2(q, scale, offset) : __hmul2(q, scale));
            }
        }
    }
};

template <class F>
struct FloatSource {
    const typename F::Raw& raw;
    __device__ __forceinline__ FloatSource(const typename F::Raw& stored, int) : raw(stored) {}

    __device__ __forceinline__ void group(int g, u32 (&out)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            float2 v = F::pair(raw, 8 * g + i), w = F::pair(raw, 8 * g + i + 1);
            out[i] = half2_bits(__floats2half2_rn(v.x, w.x));
            out[i + 1] = half2_bits(__floats2half2_rn(v.y, w.y));
        }
    }
};

template <class F, bool IS_FLOAT = F::IS_FLOAT>
struct SourceOf {
    typedef HalfSource<F> type;
};
template <class F>
struct SourceOf<F, true> {
    typedef FloatSource<F> type;
};
