// Gated delta rule over the tokens of each sequence, the state in registers, in place in its page.
//
//   q, k: unit length (eps added to the sum of squares), q / sqrt(d);  beta = sigmoid(b);  g = exp(a softplus(alpha + dt_bias))
//   S = g S;  e = beta (v - S^T k);  S += k e^T;  o = S^T q        for S [d_k, d_v], stored as [d_v][d_k] per value head
//
// delta_prepare  unit q and k in place, beta and exp(g) (or its logarithm) in place of the projections (grid: tokens; a warp a head)
// delta_net      the recurrence (grid: n_value_heads * PARTS, sequences). Eight lanes share ROWS stored rows, each DIM / 8
//                of their values, so that what comes from shared memory serves ROWS rows. Tokens go through shared memory in
//                chunks, copied while the chunk before is worked on; the next token's q and k are in registers before this
//                one's sums are. The dot product with q is no part of the chain from token to token.
//                form RAW: the inputs are as the convolution left them, and blocks prepare them for themselves (single
//                tokens: states are of an earlier step, and asked for before the kernel before has ended); WITH_LOGS: as delta_prepare leaves them for delta_chunks.cu, which does the sequences of `limit`
//                tokens and more of this step.
//
// -D  DIM (head dim, multiple of 8);  TILED 0: key head h / (Hv / Hk), 1: h % Hk
// Bytes moved: the state once in and out, q and k of the head once a part.

#include "common/follow.cuh"
#include "common/math.cuh"
#include "common/paged.cuh"
#include "common/warp.cuh"
#include "recurrent/lane_row.cuh"

#define THREADS 128
#define EACH (DIM / LANES)  // values of a row in a lane
#define ROWS 2
#define ROWS_A_BLOCK (THREADS / LANES * ROWS)
#define PARTS ((DIM + ROWS_A_BLOCK - 1) / ROWS_A_BLOCK)  // blocks that share a head's rows
#define CHUNK 16

enum { PREPARED = 0, RAW = 1, WITH_LOGS = 2 };  // as in ops/cuda/recurrent.py

struct Chunk {
    float q[CHUNK][DIM], k[CHUNK][DIM], v[CHUNK][ROWS_A_BLOCK];
    float beta[CHUNK], decay[CHUNK];
};

extern "C" __global__ void delta_prepare(float* qkv,            // [T, (2 Hk + Hv) DIM]
                                         float* beta,           // [T, Hv]
                                         float* alpha,          // [T, Hv]
                                         const float* a,        // [Hv]
                                         const float* dt_bias,  // [Hv]
                                         int n_key_heads, int n_value_heads, float eps, int as_logs) {
    follow_predecessor();
    long long token = blockIdx.x;
    int lane = threadIdx.x & 31;
    for (int head = threadIdx.x >> 5; head < 2 * n_key_heads; head += blockDim.x >> 5) {
        float* x = qkv + token * (2 * n_key_heads + n_value_heads) * DIM + head * DIM;
        float v[(DIM + 31) / 32], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < (DIM + 31) / 32; i++) {
            v[i] = lane + 32 * i < DIM ? x[lane + 32 * i] : 0.0f;
            sum = fmaf(v[i], v[i], sum);
        }
        float scale = rsqrtf(warp_sum(sum) + eps) * (head < n_key_heads ? rsqrtf((float)DIM) : 1.0f);
#pragma unroll
        for (int i = 0; i < (DIM + 31) / 32; i++)
            if (lane + 32 * i < DIM) x[lane + 32 * i] = v[i] * scale;
    }
    for (int head = threadIdx.x; head < n_value_heads; head += blockDim.x) {
        long long at = token * n_value_heads + head;
        beta[at] = sigmoid(beta[at]);
        float log_decay = a[head] * softplus(alpha[at] + dt_bias[head]);
        alpha[at] = as_logs ? log_decay : expf(log_decay);
    }
}

struct Source {
    const float *qkv, *beta, *decay;  // of the sequence's first token and the block's value head
    int channels, heads, q_at, k_at, v_at, n_rows;
};

__device__ __forceinline__ void fetch_chunk(Chunk& chunk, const Source& from, int done, int n) {
    const float* in = from.qkv + (long long)done * from.channels;
    for (int i = threadIdx.x; i < n * (DIM / 4); i += THREADS) {
        int t = i / (DIM / 4), c = (i % (DIM / 4)) * 4;
        copy_async16(&chunk.q[t][c], in + (long long)t * from.channels + from.q_at + c, true);
        copy_async16(&chunk.k[t][c], in + (long long)t * from.channels + from.k_at + c, true);
    }
    for (int i = threadIdx.x; i < n * (ROWS_A_BLOCK / 4); i += THREADS) {
        int t = i / (ROWS_A_BLOCK / 4), c = (i % (ROWS_A_BLOCK / 4)) * 4;
        if (c < from.n_rows) copy_async16(&chunk.v[t][c], in + (long long)t * from.channels + from.v_at + c, true);
    }
    for (int t = threadIdx.x; t < n; t += THREADS) {
        copy_async_float(&chunk.beta[t], from.beta + (long long)(done + t) * from.heads);
        copy_async_float(&chunk.decay[t], from.decay + (long long)(done + t) * from.heads);
    }
    commit_copies();
}

// What delta_prepare does, for the block's head and chunk.
__device__ __forceinline__ void prepare_chunk(Chunk& chunk, int n, float a, float dt_bias, float eps) {
    int lane = threadIdx.x & 31;
    for (int i = threadIdx.x >> 5; i < 2 * n; i += THREADS / 32) {
        float* x = i < n ? chunk.q[i] : chunk.k[i - n];
        float sum = 0.0f;
        for (int c = lane; c < DIM; c += 32) sum = fmaf(x[c], x[c], sum);
        float scale = rsqrtf(warp_sum(sum) + eps) * (i < n ? rsqrtf((float)DIM) : 1.0f);
        for (int c = lane; c < DIM; c += 32) x[c] *= scale;
    }
    for (int t = threadIdx.x; t < n; t += THREADS) {
        chunk.beta[t] = sigmoid(chunk.beta[t]);
        chunk.decay[t] = expf(a * softplus(chunk.decay[t] + dt_bias));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_net(const float* qkv,    // [T, (2 Hk + Hv) DIM], q and k as delta_prepare left them, or RAW
              const float* beta,   // [T, Hv]
              const float* decay,  // [T, Hv]: exp(g), or what `form` says
              const float* a,        // [Hv], used where RAW
              const float* dt_bias,  // [Hv], used where RAW
              float* out,          // [T, Hv * DIM]
              char* pool, const int* pages,  // [S, columns]
              const bool* fresh,             // [S]
              const int* query_start,        // [S + 1]
              long long page_bytes, int columns, int column, int n_key_heads, int n_value_heads, int form, float eps, int limit) {
    if (form != RAW) follow_predecessor();
    __shared__ __align__(16) Chunk chunks[2];
    // The batch was there before the step began.
    int seq = blockIdx.y, start = load_early(query_start + seq), n_tokens = load_early(query_start + seq + 1) - start;
    bool zero = load_early(fresh + seq);
    float* page = state_page<true>(pool, page_bytes, pages, columns, seq, column);
    if (!page || n_tokens <= 0 || n_tokens >= limit) {
        if (form == RAW) follow_predecessor();
        return;
    }
    int head = blockIdx.x / PARTS, first_row = blockIdx.x % PARTS * ROWS_A_BLOCK;
    int key_head = TILED ? head % n_key_heads : head / (n_value_heads / n_key_heads);
    Source from;
    from.channels = (2 * n_key_heads + n_value_heads) * DIM, from.heads = n_value_heads;
    from.qkv = qkv + (long long)start * from.channels;
    from.beta = beta + (long long)start * n_value_heads + head, from.decay = decay + (long long)start * n_value_heads + head;
    from.q_at = key_head * DIM, from.k_at = (n_key_heads + key_head) * DIM;
    from.v_at = (2 * n_key_heads + head) * DIM + first_row, from.n_rows = DIM - first_row;
    int lane = threadIdx.x % LANES, local = threadIdx.x / LANES * ROWS;
    bool mine = local < from.n_rows;  // all of a lane's rows, since DIM is a multiple of ROWS
    float* state = page + ((long long)head * DIM + first_row + (mine ? local : 0)) * DIM;
    float* to = out + ((long long)start * n_value_heads + head) * DIM + first_row + local;
    float s[ROWS][EACH];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (zero) {
#pragma unroll
            for (int i = 0; i < EACH; i++) s[r][i] = 0.0f;
        } else {
            load_row_early(s[r], state + r * DIM, lane);
        }
    }
    if (form == RAW) follow_predecessor();
    fetch_chunk(chunks[0], from, 0, min(CHUNK, n_tokens));
    for (int done = 0, stage = 0; done < n_tokens; done += CHUNK, stage ^= 1) {
        Chunk& chunk = chunks[stage];
        int n = min(CHUNK, n_tokens - done), next = min(CHUNK, n_tokens - done - CHUNK);
        if (next > 0) {
            fetch_chunk(chunks[stage ^ 1], from, done + CHUNK, next);
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();
        if (form != PREPARED) {
            if (form == RAW) prepare_chunk(chunk, n, a[head], dt_bias[head], eps);
            else if (threadIdx.x < n) chunk.decay[threadIdx.x] = expf(chunk.decay[threadIdx.x]);
            __syncthreads();
        }
        float k[EACH], q[EACH];
        load_row(k, chunk.k[0], lane);
        load_row(q, chunk.q[0], lane);
        for (int t = 0; t < n; t++) {
            float next_k[EACH], next_q[EACH], e[ROWS], g = chunk.decay[t], b = chunk.beta[t];
            int following = min(t + 1, n - 1);
            load_row(next_k, chunk.k[following], lane);
            load_row(next_q, chunk.q[following], lane);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float sk[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int i = 0; i < EACH; i++) sk[i & 3] = fmaf(s[r][i], k[i], sk[i & 3]);
                e[r] = (sk[0] + sk[1]) + (sk[2] + sk[3]);
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) e[r] = b * fmaf(-g, group_sum<LANES>(e[r]), chunk.v[t][local + r]);
            float o[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float sq[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    s[r][i] = fmaf(k[i], e[r], g * s[r][i]);
                    sq[i & 3] = fmaf(s[r][i], q[i], sq[i & 3]);
                }
                o[r] = (sq[0] + sq[1]) + (sq[2] + sq[3]);
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                o[r] = group_sum<LANES>(o[r]);
                if (lane == 0 && mine) to[(long long)(done + t) * n_value_heads * DIM + r] = o[r];
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) k[i] = next_k[i], q[i] = next_q[i];
        }
        __syncthreads();
    }
    if (!mine) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int i = 0; i < EACH; i++) state[r * DIM + element_of<EACH>(lane, i)] = s[r][i];
}
