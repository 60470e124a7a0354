// Y = W X in float32 for many tokens: routers, whose matrices are float32 and whose precision decides which experts run.
//
//   out[t][n] (+)= scale * row_scale[t] * (sum over k of W[n][k] x[t][k] + bias[n])
//
// Grid: x = tiles of 32 tokens, y = tiles of 64 rows; 256 threads, each 2 tokens x 4 rows. K in steps of 16 through shared
// memory, the next step's values in registers meanwhile. Work: 2 n_out width T operations on the float32 units.

#include "common/follow.cuh"
#include "matmul/matrices.cuh"

#define TILE_T 32
#define TILE_R 64
#define STEP 16

extern "C" __global__ void __launch_bounds__(256)
    gemm_f32(const float* x,          // [T, width], width a multiple of 16
             const float* weight,     // [n_out, width]
             float* out,              // [T, n_out]
             const float* bias,       // [n_out], or null
             const float* row_scale,  // [T], or null
             float scale, int add, int width, int n_tokens, int n_out) {
    follow_predecessor();
    // K is the slow axis, so that a thread's 4 rows and 2 tokens are neighbours.
    __shared__ __align__(16) float w_tile[STEP][TILE_R + 4];
    __shared__ __align__(16) float x_tile[STEP][TILE_T + 4];
    int first_token = blockIdx.x * TILE_T, first_row = blockIdx.y * TILE_R;
    int load_row = threadIdx.x / 4, load_k = threadIdx.x % 4 * 4;  // 4 neighbours of K of one row, and of one token
    bool has_row = first_row + load_row < n_out;
    bool has_token = load_row < TILE_T && first_token + load_row < n_tokens;
    const float* w_from = weight + (i64)(first_row + load_row) * width + load_k;
    const float* x_from = x + (i64)(first_token + load_row) * width + load_k;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 w_next = has_row ? load_constant((const float4*)w_from) : zero;
    float4 x_next = has_token ? *(const float4*)x_from : zero;
    int row = threadIdx.x % 16 * 4, token = threadIdx.x / 16 * 2;
    float sums[2][4] = {};
    for (int k = 0; k < width; k += STEP) {
        __syncthreads();
        w_tile[load_k][load_row] = w_next.x, w_tile[load_k + 1][load_row] = w_next.y;
        w_tile[load_k + 2][load_row] = w_next.z, w_tile[load_k + 3][load_row] = w_next.w;
        if (load_row < TILE_T) {
            x_tile[load_k][load_row] = x_next.x, x_tile[load_k + 1][load_row] = x_next.y;
            x_tile[load_k + 2][load_row] = x_next.z, x_tile[load_k + 3][load_row] = x_next.w;
        }
        __syncthreads();
        if (k + STEP < width) {
            if (has_row) w_next = load_constant((const float4*)(w_from + k + STEP));
            if (has_token) x_next = *(const float4*)(x_from + k + STEP);
        }
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            float4 w = *(const float4*)&w_tile[i][row];
            float2 v = *(const float2*)&x_tile[i][token];
            sums[0][0] = fmaf(w.x, v.x, sums[0][0]), sums[1][0] = fmaf(w.x, v.y, sums[1][0]);
            sums[0][1] = fmaf(w.y, v.x, sums[0][1]), sums[1][1] = fmaf(w.y, v.y, sums[1][1]);
            sums[0][2] = fmaf(w.z, v.x, sums[0][2]), sums[1][2] = fmaf(w.z, v.y, sums[1][2]);
            sums[0][3] = fmaf(w.w, v.x, sums[0][3]), sums[1][3] = fmaf(w.w, v.y, sums[1][3]);
        }
    }
    Matrix m = {nullptr, out, bias, n_out, 0, 0};
    Finish finish = {row_scale, scale, add};
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            int n = first_row + row + r, at = first_token + token + t;
            if (n < n_out && at < n_tokens) finish_product(m, finish, at, n, sums[t][r]);
        }
    }
}
