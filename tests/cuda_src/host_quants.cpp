// The formats' headers compiled for the host: the device's few intrinsics are written out, so that decoding and the
// integer dot product can be compared with the NumPy decoders without a GPU.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::min;

template <typename T>
static inline T __ldg(const T* p) {
    if ((uintptr_t)p % sizeof(T)) __builtin_trap();  // a misaligned load faults on the device
    T v;
    std::memcpy(&v, p, sizeof(T));
    return v;
}

static inline float __uint_as_float(unsigned x) {
    float f;
    std::memcpy(&f, &x, 4);
    return f;
}

static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
    return (unsigned)(((((uint64_t)hi) << 32) | lo) >> (shift & 31));
}

static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = ((uint64_t)b << 32) | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        unsigned s = (selector >> (4 * i)) & 15;
        unsigned byte = (unsigned)(bytes >> (8 * (s & 7))) & 255;
        if (s & 8) byte = byte & 128 ? 255 : 0;
        out |= byte << (8 * i);
    }
    return out;
}

static inline int __popc(unsigned x) { return __builtin_popcount(x); }

static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(int8_t)(a >> (8 * i)) * (int)(int8_t)(b >> (8 * i));
    return c;
}

static inline unsigned short __ushort_as_half(unsigned short x) { return x; }
static inline float __half2float(unsigned short h) {
    int exponent = (h >> 10) & 31, mantissa = h & 1023;
    float v = exponent == 31 ? (mantissa ? NAN : INFINITY)
              : exponent     ? std::ldexp((float)(mantissa + 1024), exponent - 25)
                             : std::ldexp((float)mantissa, -24);
    return h & 0x8000 ? -v : v;
}

#include "quants/all.cuh"

template <class F>
static void decode(const u8* row, int n_pieces, float* out) {
    for (int p = 0; p < n_pieces; p++) {
        typename F::Raw raw;
        F::load(row, p, raw);
        if constexpr (F::IS_FLOAT) {
            for (int i = 0; i < 16; i++) {
                float2 v = F::pair(raw, i);
                out[F::group(p, i / 8) + 2 * (i % 8)] = v.x;
                out[F::group(p, i / 8) + 2 * (i % 8) + 1] = v.y;
            }
        } else {
            Piece w;
            F::unpack(raw, p, w);
            for (int e = 0; e < 32; e++) out[F::group(p, e / 16) + e % 16] = piece_value<F>(w, e);
        }
    }
}

template <class F>
static float row_dot(const u8* row, int n_pieces, const i8* values, const float* scales, const int* sums) {
    float acc = 0.0f;
    if constexpr (!F::IS_FLOAT) {
        for (int p = 0; p < n_pieces; p++) {
            typename F::Raw raw;
            Piece w;
            ActPiece x;
            F::load(row, p, raw);
            F::unpack(raw, p, w);
            load_act<F>(values, scales, sums, p, x);
            acc = dot<F>(w, x, acc);
        }
    }
    return acc * F::POST;
}

#define EXPORT(F)                                                                                          \
    extern "C" void decode_##F(const u8* row, int n_pieces, float* out) { decode<F>(row, n_pieces, out); } \
    extern "C" float dot_##F(const u8* row, int n_pieces, const i8* v, const float* s, const int* sums) {  \
        return row_dot<F>(row, n_pieces, v, s, sums);                                                      \
    }

EXPORT(f32) EXPORT(f16) EXPORT(bf16) EXPORT(q4_0) EXPORT(q4_1) EXPORT(q5_0) EXPORT(q5_1) EXPORT(q8_0)
EXPORT(q2_k) EXPORT(q3_k) EXPORT(q4_k) EXPORT(q5_k) EXPORT(q6_k) EXPORT(iq4_nl) EXPORT(iq4_xs) EXPORT(mxfp4)
EXPORT(iq1_s) EXPORT(iq1_m) EXPORT(iq2_xxs) EXPORT(iq2_xs) EXPORT(iq2_s) EXPORT(iq3_xxs) EXPORT(iq3_s)
EXPORT(tq1_0) EXPORT(tq2_0) EXPORT(nvfp4)
