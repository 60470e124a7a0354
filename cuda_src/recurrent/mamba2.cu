// Mamba2 over the tokens of each sequence, the state in registers, in place in its page.
//
//   dt = softplus(dt + dt_bias);  S[p, n] = exp(dt a) S[p, n] + dt B[n] x[p];  y[p] = sum_n S[p, n] C[n] + d x[p]
//
// grid (heads * row parts, sequences). LANES lanes share ROWS rows p, each STATE / LANES of their values, so that what
// comes from shared memory serves ROWS rows. Tokens go through shared
// memory in chunks, copied while the chunk before is worked on.
//
// -D  STATE (N, multiple of 8), HEAD_DIM (P)
// Bytes moved: the state once in and out; B, C and x of the head per row part.

#include "common/follow.cuh"
#include "common/math.cuh"
#include "common/paged.cuh"
#include "common/warp.cuh"
#include "recurrent/lane_row.cuh"

#define THREADS 128
#define EACH (STATE / LANES)
#define ROWS 2
#define ROWS_A_BLOCK (THREADS / LANES * ROWS)
#define CHUNK 16

struct Chunk {
    float b[CHUNK][STATE], c[CHUNK][STATE], x[CHUNK][ROWS_A_BLOCK];
    float dt[CHUNK], decay[CHUNK];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    mamba2(const float* xbc,      // [T, inner + 2 G N] after convolution and silu
           const float* dt,       // [T, heads]
           const float* a,        // [heads]
           const float* d,        // [heads]
           const float* dt_bias,  // [heads]
           float* out,            // [T, inner]
           char* pool, const int* pages,  // [S, columns]
           const bool* fresh,             // [S]
           const int* query_start,        // [S + 1]
           long long page_bytes, int columns, int column, int n_heads, int n_groups) {
    follow_predecessor();
    __shared__ __align__(16) Chunk chunks[2];
    const int parts = (HEAD_DIM + ROWS_A_BLOCK - 1) / ROWS_A_BLOCK;
    int seq = blockIdx.y, start = query_start[seq], n_tokens = query_start[seq + 1] - start;
    float* page = state_page(pool, page_bytes, pages, columns, seq, column);
    if (!page || n_tokens <= 0) return;
    int head = blockIdx.x / parts, first_row = blockIdx.x % parts * ROWS_A_BLOCK;
    int inner = n_heads * HEAD_DIM, width = inner + 2 * n_groups * STATE, group = head / (n_heads / n_groups);
    int lane = threadIdx.x % LANES, local = threadIdx.x / LANES * ROWS, p = first_row + local;
    bool aligned = (inner | width) % 4 == 0;
    float* state = page + ((long long)head * HEAD_DIM + p) * STATE;
    float s[ROWS][EACH], bias = dt_bias[head], rate = a[head], skip = d[head];
    bool zero = fresh[seq];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int i = 0; i < EACH; i++)
            s[r][i] = zero || p + r >= HEAD_DIM ? 0.0f : state[r * STATE + element_of<EACH>(lane, i)];
    auto fetch = [&](Chunk& chunk, int done, int n) {
        const float* in = xbc + (long long)(start + done) * width;
        for (int i = threadIdx.x; i < n * (STATE / 4); i += THREADS) {
            int t = i / (STATE / 4), c = (i % (STATE / 4)) * 4;
            const float* row = in + (long long)t * width + inner + group * STATE + c;
            copy_async_floats(&chunk.b[t][c], row, aligned);
            copy_async_floats(&chunk.c[t][c], row + n_groups * STATE, aligned);
        }
        for (int i = threadIdx.x; i < n * ROWS_A_BLOCK; i += THREADS) {
            int t = i / ROWS_A_BLOCK, row = i % ROWS_A_BLOCK;
            if (first_row + row < HEAD_DIM)
                copy_async_float(&chunk.x[t][row], in + (long long)t * width + head * HEAD_DIM + first_row + row);
        }
        for (int t = threadIdx.x; t < n; t += THREADS)
            copy_async_float(&chunk.dt[t], dt + (long long)(start + done + t) * n_heads + head);
        commit_copies();
    };
    fetch(chunks[0], 0, min(CHUNK, n_tokens));
    for (int done = 0, stage = 0; done < n_tokens; done += CHUNK, stage ^= 1) {
        Chunk& chunk = chunks[stage];
        int n = min(CHUNK, n_tokens - done), next = min(CHUNK, n_tokens - done - CHUNK);
        if (next > 0) {
            fetch(chunks[stage ^ 1], done + CHUNK, next);
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();
        for (int t = threadIdx.x; t < n; t += THREADS) {
            float step = softplus(chunk.dt[t] + bias);
            chunk.dt[t] = step;
            chunk.decay[t] = expf(step * rate);
        }
        __syncthreads();
#pragma unroll 2
        for (int t = 0; t < n; t++) {
            float b[EACH], c[EACH], decay = chunk.decay[t], sum[ROWS];
            load_row(b, chunk.b[t], lane);
            load_row(c, chunk.c[t], lane);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float add = chunk.dt[t] * chunk.x[t][local + r], y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    s[r][i] = fmaf(add, b[i], decay * s[r][i]);
                    y[i & 3] = fmaf(s[r][i], c[i], y[i & 3]);
                }
                sum[r] = (y[0] + y[1]) + (y[2] + y[3]);
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                sum[r] = group_sum<LANES>(sum[r]);
                if (lane == 0 && p + r < HEAD_DIM)
                    out[(long long)(start + done + t) * inner + head * HEAD_DIM + p + r] = fmaf(skip, chunk.x[t][local + r], sum[r]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (p + r < HEAD_DIM)
#pragma unroll
            for (int i = 0; i < EACH; i++) state[r * STATE + element_of<EACH>(lane, i)] = s[r][i];
}
