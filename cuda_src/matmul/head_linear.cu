// Every head through a matrix of its own, float32 activations: the absorbed projections of latent attention.
//
//   out[t, h] = [factor * W_h x[t, h, :n_in] | x[t, h, n_in:]]
//
// grid (rows / ROWS, heads, tokens / TOKEN_TILE). A block's inputs lie in shared memory; a weight is unpacked once for
// TOKEN_TILE tokens. A row's sum is made of ROW_LANES parts, of every ROW_LANES-th piece each, which are added as a tree;
// so its order depends on ROW_LANES, which depends on n_in, and on nothing else. Few tokens: neighbouring lanes have a
// part each. Many tokens (-DWHOLE_ROWS 1): a thread has all parts of a row, one after the other, so that all threads read
// the same inputs at once.
//
// -D  FORMAT: a struct of quants/; ROW_LANES 4 8; TOKEN_TILE 1 8; WHOLE_ROWS 0 1. Bytes moved: the matrices once per
//     TOKEN_TILE tokens, inputs and outputs once per block of rows.

#include "common/act_store.cuh"
#include "common/follow.cuh"
#include "common/warp.cuh"
#include "quants/all.cuh"

#define THREADS (WHOLE_ROWS ? 128 : 256)
#define ROW_THREADS (WHOLE_ROWS ? 1 : ROW_LANES)
#define ROWS (THREADS / ROW_THREADS)

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

// The sum over parts `part`, `part` + STEP, ... as group_sum() adds them up between lanes.
template <class F, int STEP>
__device__ __forceinline__ void add_parts(float (&sums)[TOKEN_TILE], const u8* row, int n_in, const float* x, int stride, int part) {
    if constexpr (STEP == ROW_LANES) {
#pragma unroll
        for (int t = 0; t < TOKEN_TILE; t++) sums[t] = 0.0f;
        dot_row<F>(sums, row, n_in, x, stride, part);
    } else {
        float others[TOKEN_TILE];
        add_parts<F, 2 * STEP>(sums, row, n_in, x, stride, part);
        add_parts<F, 2 * STEP>(others, row, n_in, x, stride, part + STEP);
#pragma unroll
        for (int t = 0; t < TOKEN_TILE; t++) sums[t] += others[t];
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
    __shared__ __align__(16) float products[TOKEN_TILE][ROWS];
    int n = min(TOKEN_TILE, n_tokens - first), stride = place_of(n_in);
    int in_row = n_head * (n_in + rest), out_row = n_head * (n_out + rest);  // elements of a token
    const float* from = x + (i64)first * in_row + head * (n_in + rest);
    float* to = out + (i64)first * out_row + head * (n_out + rest);
    for (int i = threadIdx.x; i < TOKEN_TILE * n_in; i += THREADS)
        inputs[i / n_in * stride + place_of(i % n_in)] = i / n_in < n ? from[(i64)(i / n_in) * in_row + i % n_in] : 0.0f;
    for (int i = threadIdx.x; blockIdx.x == 0 && i < n * rest; i += THREADS)
        to[(i64)(i / rest) * out_row + n_out + i % rest] = from[(i64)(i / rest) * in_row + n_in + i % rest];
    __syncthreads();
    int lane = threadIdx.x % ROW_THREADS, row = threadIdx.x / ROW_THREADS;
    const u8* weight_row = weights + ((i64)head * n_out + min(first_row + row, n_out - 1)) * row_bytes;
    float sums[TOKEN_TILE] = {0.0f};
    if (WHOLE_ROWS) add_parts<FORMAT, 1>(sums, weight_row, n_in, inputs, stride, 0);
    else dot_row<FORMAT>(sums, weight_row, n_in, inputs, stride, lane);
#pragma unroll
    for (int t = 0; t < TOKEN_TILE; t++) {
        float product = group_sum<ROW_THREADS>(sums[t]) * factor;
        if (lane == t % ROW_THREADS) products[t][row] = product;
    }
    __syncthreads();
    int warp = threadIdx.x >> 5, column = threadIdx.x & 31;
    for (int i = warp; i < n * (ROWS / 32); i += THREADS / 32) {
        int t = i / (ROWS / 32), r = i % (ROWS / 32) * 32 + column;
        if (first_row + r - column >= n_out) continue;  // whole warps
        bool inside = first_row + r < n_out;
        if (inside) to[(i64)t * out_row + first_row + r] = products[t][r];
        int block = (head * n_out + first_row + r) / ACT_BLOCK;
        if (act_values) store_act_block(ACT_ARGUMENTS, first + t, n_head * n_out, block, products[t][r]);
    }
}
