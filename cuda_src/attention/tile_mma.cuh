// Matrix fragments of 16-bit elements in shared memory, for mma.sync m16n8k16 with float32 sums (sm_80 and later).
// Needs -DELEMENT 0 (f16) or 1 (bf16).
#pragma once
#include "attention/element.cuh"
#include "common/mma.cuh"

// Like load_matrices, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], const element_t* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

// c[16x8] += a[16x16] b[16x8]
__device__ __forceinline__ void multiply_add_elements(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if ELEMENT == 1
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    multiply_add(c, a, b0, b1);
#endif
}

// The 8x8 matrix of 16-bit elements that the warp holds (lane l: row l / 4, columns 2 (l % 4) and the next), transposed.
__device__ __forceinline__ u32 transpose_matrix(u32 r) {
    u32 t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(r));
    return t;
}

__device__ __forceinline__ unsigned pack_pair(float low, float high) {
#if ELEMENT == 0
    __half2 h = __floats2half2_rn(low, high);
#else
    __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
#endif
    return *(unsigned*)&h;
}
