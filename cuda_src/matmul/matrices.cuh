// Up to four matrices that share their input, as kernel arguments, and what is done with a product.
//
//   out[t][n] (+)= scale * row_scale[t] * (W[n] . x[t] + bias[n])
//
// Matrix i owns the blocks first_i .. of the grid's x axis; formats are -DFORMAT_A, FORMAT_B, FORMAT_C and kind_i picks.
#pragma once

#include "common/types.cuh"

#define ONE_MATRIX(i)                                \
    const u8 *weight##i,      /* packed rows */      \
        float *out##i,        /* [T, n_out] */       \
        const float *bias##i, /* [n_out], or null */ \
        int n_out##i, int first##i, int kind##i
#define MATRICES ONE_MATRIX(0), ONE_MATRIX(1), ONE_MATRIX(2), ONE_MATRIX(3)

struct Matrix {
    const u8* weight;
    float* out;
    const float* bias;
    int n_out;
    int first;  // its first block
    int kind;
};

// The matrix that block b of the x axis works on, out of the kernel's arguments.
#define PICK_MATRIX(m, b)                                                                           \
    Matrix m = (b) >= first3   ? Matrix{weight3, out3, bias3, n_out3, first3, kind3}                \
               : (b) >= first2 ? Matrix{weight2, out2, bias2, n_out2, first2, kind2}                \
               : (b) >= first1 ? Matrix{weight1, out1, bias1, n_out1, first1, kind1}                \
                               : Matrix{weight0, out0, bias0, n_out0, first0, kind0}

struct Finish {
    const float* row_scale;  // [T], or null
    float scale;
    int add;
};

__device__ __forceinline__ void finish_product(const Matrix& m, const Finish& f, int token, int n, float product) {
    float v = f.scale * (m.bias ? product + load_constant(m.bias + n) : product);
    if (f.row_scale) v *= f.row_scale[token];
    float* at = m.out + (i64)token * m.n_out + n;
    *at = f.add ? *at + v : v;
}
