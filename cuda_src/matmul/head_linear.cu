// Every head through a matrix of its own, float32 activations: the absorbed projections of latent attention.
//
//   out[t, h] = [factor * W_h x[t, h, :n_in] | x[t, h, n_in:]]
//
// grid (rows / THREADS, heads, tokens / TOKENS). A thread has one row of W_h and TOKENS tokens, whose inputs lie in shared
// memory; a weight is unpacked once for all of them. A row's sum runs along the row, whatever the batch.
//
// -D  FORMAT: a struct of quants/. Bytes moved: the matrices once per TOKENS tokens, inputs and outputs once per block of rows.

#include "common/follow.cuh"
#include "quants/all.cuh"

#define THREADS 128
#define TOKENS 8

// sums[t] += weights . x of one stretch of N elements
template <int N>
__device__ __forceinline__ void accumulate(float (&sums)[TOKENS], const float (&w)[N], const float* x, int stride) {
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float4 v = *(const float4*)(x + t * stride + i);
            sums[t] = fmaf(w[i + 3], v.w, fmaf(w[i + 2], v.z, fmaf(w[i + 1], v.y, fmaf(w[i], v.x, sums[t]))));
        }
}

template <class F>
__device__ __forceinline__ void dot_row(float (&sums)[TOKENS], const u8* row, int n_in, const float* x) {
    if constexpr (F::IS_FLOAT) {
        for (int c = 0; c < n_in; c += 8) {
            float w[8];
            F::load8(row + c * F::BYTES, w);
            accumulate(sums, w, x + c, n_in);
        }
    } else {
        for (int piece = 0; piece < n_in / 32; piece++) {
            typename F::Raw raw;
            Piece packed;
            F::load(row, piece, raw);
            F::unpack(raw, piece, packed);
#pragma unroll
            for (int g = 0; g < 2; g++) {
                float w[16];
#pragma unroll
                for (int i = 0; i < 16; i++) w[i] = piece_value<F>(packed, 16 * g + i);
                accumulate(sums, w, x + F::group(piece, g), n_in);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    head_linear(const float* x,     // [T, n_head * (n_in + rest)]
                const u8* weights,  // [n_head * n_out, row_bytes]
                float* out,         // [T, n_head * (n_out + rest)]
                int n_tokens, int n_head, int n_in, int n_out, int rest, i64 row_bytes, float factor) {
    follow_predecessor();
    extern __shared__ __align__(16) float inputs[];  // [TOKENS, n_in]
    int head = blockIdx.y, first = blockIdx.z * TOKENS, row = blockIdx.x * THREADS + threadIdx.x;
    int n = min(TOKENS, n_tokens - first), in_width = n_in + rest, out_width = n_out + rest;
    const float* from = x + ((i64)first * n_head + head) * in_width;
    float* to = out + ((i64)first * n_head + head) * out_width;
    for (int i = threadIdx.x; i < TOKENS * n_in; i += THREADS)
        inputs[i] = i / n_in < n ? from[(i64)(i / n_in) * n_head * in_width + i % n_in] : 0.0f;
    for (int i = threadIdx.x; blockIdx.x == 0 && i < n * rest; i += THREADS)
        to[(i64)(i / rest) * n_head * out_width + n_out + i % rest] = from[(i64)(i / rest) * n_head * in_width + n_in + i % rest];
    __syncthreads();
    if (row >= n_out) return;
    float sums[TOKENS] = {0.0f};
    dot_row<FORMAT>(sums, weights + ((i64)head * n_out + row) * row_bytes, n_in, inputs);
    for (int t = 0; t < n; t++) to[(i64)t * n_head * out_width + row] = sums[t] * factor;
}
