// Every head through a matrix of its own, float32 activations: the absorbed projections of latent attention.
//
//   out[t, h] = [factor * W_h x[t, h, :n_in] | x[t, h, n_in:]]
//
// grid (rows / ROWS, heads, tokens / TOKEN_TILE). ROW_LANES neighbouring lanes have one row of W_h, a piece each in turn, and
// TOKEN_TILE tokens, whose inputs lie in shared memory; a weight is unpacked once for all of them. The order of a row's sum
// depends on ROW_LANES, which depends on n_in, and on nothing else.
//
// -D  FORMAT: a struct of quants/; ROW_LANES 4 8; TOKEN_TILE 1 8. Bytes moved: the matrices once per TOKEN_TILE tokens, inputs and
//     outputs once per block of rows.

#include "common/act_store.cuh"
#include "common/follow.cuh"
#include "common/warp.cuh"
#include "quants/all.cuh"

#define THREADS 256
#define ROWS (THREADS / ROW_LANES)

// Where element e of a token's inputs lies: 4 more after each 32, so that lanes with a piece each meet all banks.
__device__ __forceinline__ int place_of(int e) { return e + e / 32 * 4; }

// sums[t] += weights . x of one stretch of N elements inside 32
template <int N>
__device__ __forceinline__ void accumulate(float (&sums)[TOKEN_TILE], const float (&w)[N], const float* x, int stride) {
#pragma unroll
    for (int t = 0; t < TOKEN_TILE; t++)
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float4 v = *(const float4*)(x + t * stride + i);
            sums[t] = fmaf(w[i + 3], v.w, fmaf(w[i + 2], v.z, fmaf(w[i + 1], v.y, fmaf(w[i], v.x, sums[t]))));
        }
}

template <class F>
__device__ __forceinline__ void dot_row(float (&sums)[TOKEN_TILE], const u8* row, int n_in, const float* x, int stride, int lane) {
    if constexpr (F::IS_FLOAT) {
#pragma unroll 4
        for (int c = lane * 8; c < n_in; c += ROW_LANES * 8) {
            float w[8];
            F::load8(row + c * F::BYTES, w);
            accumulate(sums, w, x + place_of(c), stride);
        }
    } else {
#pragma unroll 2
        for (int piece = lane; piece < n_in / 32; piece += ROW_LANES) {
            typename F::Raw raw;
            Piece packed;
            F::load(row, piece, raw);
            F::unpack(raw, piece, packed);
#pragma unroll
            for (int g = 0; g < 2; g++) {
                float w[16];
#pragma unroll
                for (int i = 0; i < 16; i++) w[i] = piece_value<F>(packed, 16 * g + i);
                accumulate(sums, w, x + place_of(F::group(piece, g)), stride);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    head_linear(const float* x,     // [T, n_head * (n_in + rest)]
                const u8* weights,  // [n_head * n_out, row_bytes]
                float* out,         // [T, n_head * (n_out + rest)]
                ACT_PARAMETERS,     // its 8-bit form, or null; n_out a multiple of 32, rest 0
                int n_tokens, int n_head, int n_in, int n_out, int rest, i64 row_bytes, float factor) {
    int head = blockIdx.y, first = blockIdx.z * TOKEN_TILE, first_row = blockIdx.x * ROWS;
    if (blockIdx.z == 0)
        fetch_ahead(weights + ((i64)head * n_out + first_row) * row_bytes, min(ROWS, n_out - first_row) * row_bytes);
    follow_predecessor();
    extern __shared__ __align__(16) float inputs[];  // [TOKEN_TILE, place_of(n_in)]
    __shared__ float products[TOKEN_TILE][ROWS];
    int n = min(TOKEN_TILE, n_tokens - first), in_width = n_in + rest, out_width = n_out + rest, stride = place_of(n_in);
    const float* from = x + ((i64)first * n_head + head) * in_width;
    float* to = out + ((i64)first * n_head + head) * out_width;
    for (int i = threadIdx.x; i < TOKEN_TILE * n_in; i += THREADS)
        inputs[i / n_in * stride + place_of(i % n_in)] = i / n_in < n ? from[(i64)(i / n_in) * n_head * in_width + i % n_in] : 0.0f;
    for (int i = threadIdx.x; blockIdx.x == 0 && i < n * rest; i += THREADS)
        to[(i64)(i / rest) * n_head * out_width + n_out + i % rest] = from[(i64)(i / rest) * n_head * in_width + n_in + i % rest];
    __syncthreads();
    int lane = threadIdx.x % ROW_LANES, row = threadIdx.x / ROW_LANES;
    float sums[TOKEN_TILE] = {0.0f};
    dot_row<FORMAT>(sums, weights + ((i64)head * n_out + min(first_row + row, n_out - 1)) * row_bytes, n_in, inputs, stride, lane);
#pragma unroll
    for (int t = 0; t < TOKEN_TILE; t++) {
        float product = group_sum<ROW_LANES>(sums[t]) * factor;
        if (lane == t % ROW_LANES) products[t][row] = product;
    }
    __syncthreads();
    int warp = threadIdx.x >> 5, column = threadIdx.x & 31;
    for (int i = warp; i < n * (ROWS / 32); i += THREADS / 32) {
        int t = i / (ROWS / 32), r = i % (ROWS / 32) * 32 + column;
        if (first_row + r - column >= n_out) continue;  // whole warps
        bool inside = first_row + r < n_out;
        if (inside) to[(i64)t * n_head * out_width + first_row + r] = products[t][r];
        if (act_values) store_act_block(ACT_ARGUMENTS, first + t, n_head * n_out, (head * n_out + first_row + r) / ACT_BLOCK, products[t][r]);
    }
}
