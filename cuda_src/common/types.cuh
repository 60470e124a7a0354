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

// What no kernel writes, through the path that nobody keeps coherent. A kernel that starts while its predecessor ends
// (common/follow.cuh) may find there what an address held before that one wrote to it: so no parameter is __restrict__, by
// which the compiler would choose that path for itself, and all that kernels write is read as usual or by load_settled().
template <class T>
__device__ __forceinline__ T load_constant(const T* p) {
    return __ldg(p);
}

// What an earlier kernel wrote and no thread of this one writes, where the compiler cannot see that the address is of global
// memory, since it comes out of a table. The table is read after follow_predecessor(), and so is what it names.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ u32 load_settled(const u8* p) {
    u32 v;
    asm("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ u32 load_settled(const u16* p) {
    u32 v;
    asm("ld.global.u16 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ u32 load_settled(const u32* p) {
    u32 v;
    asm("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load_settled(const uint2* p) {
    uint2 v;
    asm("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ uint4 load_settled(const uint4* p) {
    uint4 v;
    asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
#else
template <class T>
__device__ __forceinline__ T load_settled(const T* p) {
    return __ldg(p);
}
#endif

// load_constant() where it is written: left to itself, the compiler moves it behind a wait, to where it is used.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ float load_constant_here(const float* p) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ u32 load_constant_here(const u8* p) {
    u32 v;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ u32 load_constant_here(const u16* p) {
    u32 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ u32 load_constant_here(const u32* p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load_constant_here(const uint2* p) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ uint4 load_constant_here(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
#else
template <class T>
__device__ __forceinline__ T load_constant_here(const T* p) {
    return __ldg(p);
}
#endif

// Packed weights: constant, but for those of experts, which kernels bring (-DSETTLED_WEIGHTS, common/experts.cuh), or where
// they lie in shared memory (-DSHARED_WEIGHTS, matmul/ring.cuh). -DWEIGHTS_HERE: a kernel asks for some before it waits.
template <class T>
__device__ __forceinline__ auto load_packed(const T* p) {
#if defined(SHARED_WEIGHTS) && defined(__CUDA_ARCH__)
    return *p;
#elif defined(SETTLED_WEIGHTS)
    return load_settled(p);
#elif defined(WEIGHTS_HERE)
    return load_constant_here(p);
#else
    return load_constant(p);
#endif
}

// Loads of packed weights. `address` has the alignment of the loaded type.
__device__ __forceinline__ u32 load_u8(const u8* p) { return load_packed(p); }
__device__ __forceinline__ u32 load_u16(const u8* p) { return load_packed((const u16*)p); }
__device__ __forceinline__ u32 load_u32(const u8* p) { return load_packed((const u32*)p); }

// N words from an address of alignment 4.
template <int N>
__device__ __forceinline__ void load_words4(const u8* p, u32 (&w)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = load_packed((const u32*)p + i);
}

// N words (an even number) from an address of alignment 8.
template <int N>
__device__ __forceinline__ void load_words8(const u8* p, u32 (&w)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        uint2 v = load_packed((const uint2*)p + i / 2);
        w[i] = v.x, w[i + 1] = v.y;
    }
}

// N words (a multiple of four) from an address of alignment 16.
template <int N>
__device__ __forceinline__ void load_words16(const u8* p, u32 (&w)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        uint4 v = load_packed((const uint4*)p + i / 4);
        w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
    }
}

// The multiple of N at or below p. In shared memory by taking off what p is beyond it: a compiler loses sight of whose memory
// an address is in when its bits are cut off.
template <int N>
__device__ __forceinline__ const u8* aligned_down(const u8* p) {
#ifdef SHARED_WEIGHTS
    return p - ((u32)(u64)p & (N - 1));
#else
    return (const u8*)((u64)p & ~(u64)(N - 1));
#endif
}

// N words from shift / 8 < 4 bytes behind an address of alignment 4, by aligned loads and shifts: half as many loads as by 16
// bits at a time. The words around the wanted bytes hold at least one of them each, so nothing outside an allocation of whole
// words is touched.
template <int N>
__device__ __forceinline__ void load_words(const u8* aligned, u32 shift, u32 (&w)[N]) {
    const u32* base = (const u32*)aligned;
    u32 a[N + 1];
#pragma unroll
    for (int i = 0; i < N; i++) a[i] = load_packed(base + i);
    a[N] = shift ? load_packed(base + N) : 0u;
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = __funnelshift_r(a[i], a[i + 1], shift);
}

// The same from any address.
template <int N>
__device__ __forceinline__ void load_words(const u8* p, u32 (&w)[N]) {
    load_words(aligned_down<4>(p), ((u32)(u64)p & 3u) * 8u, w);
}

// N words (a multiple of four) from `offset` < 16 bytes behind an address of alignment 16, by N / 4 + 1 aligned loads of 16
// bytes: where neighbouring lanes read neighbouring pieces, the number of loads is what the first-level cache is short of.
// Every loaded vector holds at least one of the wanted bytes.
template <int N>
__device__ __forceinline__ void load_vectors(const u8* aligned, u32 offset, u32 (&w)[N]) {
#ifdef SHARED_WEIGHTS
    // There, more loads cost less than choosing among words.
    load_words(aligned + (offset & 12u), (offset & 3u) * 8u, w);
#else
    const uint4* base = (const uint4*)aligned;
    u32 a[N + 4];
#pragma unroll
    for (int i = 0; i < N / 4 + 1; i++) {
        uint4 v = i < N / 4 || offset ? load_packed(base + i) : make_uint4(0u, 0u, 0u, 0u);
        a[4 * i] = v.x, a[4 * i + 1] = v.y, a[4 * i + 2] = v.z, a[4 * i + 3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < N + 2; i++) a[i] = offset & 8u ? a[i + 2] : a[i];
#pragma unroll
    for (int i = 0; i < N + 1; i++) a[i] = offset & 4u ? a[i + 1] : a[i];
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = __funnelshift_r(a[i], a[i + 1], (offset & 3u) * 8u);
#endif
}

// The same from any address.
template <int N>
__device__ __forceinline__ void load_vectors(const u8* p, u32 (&w)[N]) {
    load_vectors(aligned_down<16>(p), (u32)(u64)p & 15u, w);
}

__device__ __forceinline__ float half_bits_to_float(u32 bits) {
    return __half2float(__ushort_as_half((u16)bits));
}

// Each byte of x, at most 127, minus c (at most 127): two's complement bytes. No borrow crosses a byte.
__device__ __forceinline__ u32 minus_bytes(u32 x, u32 c) {
    return ((x | 0x80808080u) - c * 0x01010101u) ^ 0x80808080u;
}
