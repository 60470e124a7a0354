// float32 matrices on tensor cores: each operand as the sum of two of 11 significant bits, of whose four products the
// three that count are added up (m16n8k8, tf32). The error is near that of float32 arithmetic.
//
// Lane l is (g, t) = (l / 4, l % 4). A tile of a (16 x 8) is a[0..3] = (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4);
// of b (8 x 8) b[0, 1] = (t, g), (t + 4, g); of c (16 x 8) c[0..3] = (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ void multiply_add_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x = high + low exactly; what is left of low beyond 11 bits the tensor cores leave out.
__device__ __forceinline__ void split_float(float x, u32& high, u32& low) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;  // rounded, so that errors have either sign
    low = __float_as_uint(x - __uint_as_float(high));
}

__device__ __forceinline__ void split_floats(const float (&x)[4], u32 (&high)[4], u32 (&low)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) split_float(x[i], high[i], low[i]);
}

// c += a b for a 16 x n_k and b n_k x 8 TILES. a(row, k), b(k, column): where a lane finds them.
template <int TILES, class A, class B>
__device__ __forceinline__ void multiply_add_floats(float (&c)[TILES][4], int n_k, A a, B b) {
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll 2
    for (int k = 0; k < n_k; k += 8) {
        const float values[4] = {a(g, k + t), a(g + 8, k + t), a(g, k + t + 4), a(g + 8, k + t + 4)};
        u32 high[4], low[4], b_high[TILES][2], b_low[TILES][2];
        split_floats(values, high, low);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            split_float(b(k + t, 8 * i + g), b_high[i][0], b_low[i][0]);
            split_float(b(k + t + 4, 8 * i + g), b_high[i][1], b_low[i][1]);
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) multiply_add_tf32(c[i], high, b_low[i][0], b_low[i][1]);
#pragma unroll
        for (int i = 0; i < TILES; i++) multiply_add_tf32(c[i], low, b_high[i][0], b_high[i][1]);
#pragma unroll
        for (int i = 0; i < TILES; i++) multiply_add_tf32(c[i], high, b_high[i][0], b_high[i][1]);
    }
}
