// Short names of the integer types, loads of any alignment, and the 8-bit form of activations.
//
// Quantised activations (rimuru/ops/cuda/matmul.py allocates them), a row of W elements in blocks of 32:
//
//   values int8 [T, W]        x = scale * value
//   scales f32  [T, W / 32]   largest magnitude of the block / 127
//   sums   i32  [T, W / 32]   sum of values 0..15 (low 16 bits) and of values 16..31 (high 16 bits), exact
//
// Integer sums keep offsets exact: no input below 1e35 can overflow them.
#pragma once
#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// Whether two types are one (NVRTC has no <type_traits> without the host's headers).
template <class A, class B>
struct IsSame {
    static constexpr bool value = false;
};
template <class A>
struct IsSame<A, A> {
    static constexpr bool value = true;
};

#define ACT_BLOCK 32

// The rows of an activation in the forms that kernels read.
struct ActView {
    const float* f32;     // [T, width]
    const i8* values;     // [T, width]
    const float* scales;  // [T, width / 32]
    const int* sums;      // [T, width / 32]
    int width;
};

// Read-only loads of packed weights. `address` has the alignment of the loaded type.
__device__ __forceinline__ u32 load_u8(const u8* p) { return __ldg(p); }
__device__ __forceinline__ u32 load_u16(const u8* p) { return __ldg((const u16*)p); }
__device__ __forceinline__ u32 load_u32(const u8* p) { return __ldg((const u32*)p); }

// N words from an address of alignment 4.
template <int N>
__device__ __forceinline__ void load_words4(const u8* p, u32 (&w)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = __ldg((const u32*)p + i);
}

// N words (an even number) from an address of alignment 8.
template <int N>
__device__ __forceinline__ void load_words8(const u8* p, u32 (&w)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        uint2 v = __ldg((const uint2*)p + i / 2);
        w[i] = v.x, w[i + 1] = v.y;
    }
}

// N words (a multiple of four) from an address of alignment 16.
template <int N>
__device__ __forceinline__ void load_words16(const u8* p, u32 (&w)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        uint4 v = __ldg((const uint4*)p + i / 4);
        w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
    }
}

// N words from any address, by aligned loads and shifts: half as many loads as by 16 bits at a time. The words around
// the wanted bytes hold at least one of them each, so nothing outside an allocation of whole words is touched.
template <int N>
__device__ __forceinline__ void load_words(const u8* p, u32 (&w)[N]) {
    const u32* base = (const u32*)((u64)p & ~3ull);
    u32 shift = ((u32)(u64)p & 3u) * 8u;
    u32 a[N + 1];
#pragma unroll
    for (int i = 0; i < N; i++) a[i] = __ldg(base + i);
    a[N] = shift ? __ldg(base + N) : 0u;
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = __funnelshift_r(a[i], a[i + 1], shift);
}

// N words (a multiple of four) from any address, by N / 4 + 1 aligned loads of 16 bytes: where neighbouring lanes read
// neighbouring pieces, the number of loads is what the first-level cache is short of. Every loaded vector holds at least
// one of the wanted bytes.
template <int N>
__device__ __forceinline__ void load_vectors(const u8* p, u32 (&w)[N]) {
    const uint4* base = (const uint4*)((u64)p & ~15ull);
    u32 offset = (u32)(u64)p & 15u, a[N + 4];
#pragma unroll
    for (int i = 0; i < N / 4 + 1; i++) {
        uint4 v = i < N / 4 || offset ? __ldg(base + i) : make_uint4(0u, 0u, 0u, 0u);
        a[4 * i] = v.x, a[4 * i + 1] = v.y, a[4 * i + 2] = v.z, a[4 * i + 3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < N + 2; i++) a[i] = offset & 8u ? a[i + 2] : a[i];
#pragma unroll
    for (int i = 0; i < N + 1; i++) a[i] = offset & 4u ? a[i + 1] : a[i];
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = __funnelshift_r(a[i], a[i + 1], (offset & 3u) * 8u);
}

__device__ __forceinline__ float half_bits_to_float(u32 bits) {
    return __half2float(__ushort_as_half((u16)bits));
}

// Each byte of x, at most 127, minus c (at most 127): two's complement bytes. No borrow crosses a byte.
__device__ __forceinline__ u32 minus_bytes(u32 x, u32 c) {
    return ((x | 0x80808080u) - c * 0x01010101u) ^ 0x80808080u;
}
