// Mamba1 over the tokens of each sequence, the state in registers, in place in its page.
//
//   dt = softplus(dt);  S[i, n] = exp(dt[i] A[i, n]) S[i, n] + dt[i] B[n] x[i];  y[i] = sum_n S[i, n] C[n] + d[i] x[i]
//
// grid (inner / ROWS_A_BLOCK, sequences). LANES lanes share a channel i, each STATE / LANES of its values.
//
// -D  STATE (N, multiple of 4)
// Bytes moved: the state once in and out, x and dt once, B and C once a block (from L2).

#include "common/follow.cuh"
#include "common/math.cuh"
#include "common/paged.cuh"
#include "common/warp.cuh"

#define THREADS 128
#define LANES 4
#define EACH (STATE / LANES)
#define ROWS_A_BLOCK (THREADS / LANES)
#define CHUNK 16

extern "C" __global__ void __launch_bounds__(THREADS)
    mamba1(const float* x,   // [T, inner] after convolution and silu
           const float* dt,  // [T, inner] before softplus
           const float* b,   // [T, N]
           const float* c,   // [T, N]
           const float* a,   // [inner, N]
           const float* d,   // [inner]
           float* out,       // [T, inner]
           char* pool, const int* pages,  // [S, columns]
           const bool* fresh,             // [S]
           const int* query_start,        // [S + 1]
           long long page_bytes, int columns, int column, int inner) {
    follow_predecessor();
    __shared__ __align__(16) float bs[CHUNK][STATE], cs[CHUNK][STATE], xs[CHUNK][ROWS_A_BLOCK], dts[CHUNK][ROWS_A_BLOCK];
    int seq = blockIdx.y, start = query_start[seq], n_tokens = query_start[seq + 1] - start;
    float* page = state_page(pool, page_bytes, pages, columns, seq, column);
    if (!page || n_tokens <= 0) return;
    int lane = threadIdx.x % LANES, local = threadIdx.x / LANES, first = blockIdx.x * ROWS_A_BLOCK, i = first + local;
    bool mine = i < inner;
    long long row = mine ? i : 0;
    float s[EACH], rate[EACH], skip = d[row];
    bool zero = fresh[seq];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        s[e] = zero || !mine ? 0.0f : page[row * STATE + e * LANES + lane];
        rate[e] = a[row * STATE + e * LANES + lane];
    }
    for (int done = 0; done < n_tokens; done += CHUNK) {
        int n = min(CHUNK, n_tokens - done);
        long long token = start + done;
        __syncthreads();
        for (int j = threadIdx.x; j < n * STATE; j += THREADS) {
            bs[j / STATE][j % STATE] = b[token * STATE + j];
            cs[j / STATE][j % STATE] = c[token * STATE + j];
        }
        for (int j = threadIdx.x; j < n * ROWS_A_BLOCK; j += THREADS) {
            int t = j / ROWS_A_BLOCK, r = j % ROWS_A_BLOCK;
            bool inside = first + r < inner;
            xs[t][r] = inside ? x[(token + t) * inner + first + r] : 0.0f;
            dts[t][r] = inside ? softplus(dt[(token + t) * inner + first + r]) : 0.0f;
        }
        __syncthreads();
        for (int t = 0; t < n; t++) {
            float in = xs[t][local], step = dts[t][local], add = step * in, y = 0.0f;
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                s[e] = fmaf(add, bs[t][e * LANES + lane], expf(step * rate[e]) * s[e]);
                y = fmaf(s[e], cs[t][e * LANES + lane], y);
            }
            y = group_sum<LANES>(y);
            if (lane == 0 && mine) out[(token + t) * inner + i] = fmaf(skip, in, y);
        }
    }
    if (mine)
#pragma unroll
        for (int e = 0; e < EACH; e++) page[row * STATE + e * LANES + lane] = s[e];
}
