// Gated delta rule over the tokens of each sequence, the state in registers, in place in its page.
//
//   q, k: unit length (eps added to the sum of squares), q / sqrt(d);  beta = sigmoid(b);  g = exp(a softplus(alpha + dt_bias))
//   S = g S;  e = beta (v - S^T k);  S += k e^T;  o = S^T q        for S [d_k, d_v], stored as [d_v][d_k] per value head
//
// With the old state's products p = S k and r = S q of one stored row: o = g r + e (k . q), so a token needs one pass.
// grid (n_value_heads * PARTS, sequences). Eight lanes share a stored row, each DIM / 8 of its values; a warp has
// 4 * ROWS rows. Tokens go through shared memory in chunks, copied while the chunk before is worked on.
//
// -D  DIM (head dim, multiple of 8);  TILED 0: key head h / (Hv / Hk), 1: h % Hk
// Bytes moved: the state once in and out, q and k of the head once a part.

#include "common/async_copy.cuh"
#include "common/math.cuh"
#include "common/paged.cuh"
#include "common/warp.cuh"

#define THREADS 128
#define LANES 8
#define ROWS 1
#define EACH (DIM / LANES)  // values of a row in a lane
#define ROWS_A_BLOCK (THREADS / LANES * ROWS)
#define PARTS ((DIM + ROWS_A_BLOCK - 1) / ROWS_A_BLOCK)  // blocks that share a head's rows
#define CHUNK 8

struct Chunk {
    float q[CHUNK][DIM], k[CHUNK][DIM], v[CHUNK][ROWS_A_BLOCK];
    float beta[CHUNK], decay[CHUNK], kq[CHUNK];
};

// Which value of a row a lane's i-th is: float4 groups where the width allows, so that shared loads are 16 bytes wide.
__device__ __forceinline__ int element_of(int lane, int i) {
    return EACH % 4 == 0 ? (i / 4) * (4 * LANES) + lane * 4 + i % 4 : i * LANES + lane;
}

__device__ __forceinline__ void load_row(float (&to)[EACH], const float* from, int lane) {
    if (EACH % 4 == 0) {
#pragma unroll
        for (int i = 0; i < EACH / 4; i++) {
            float4 w = *(const float4*)(from + i * 4 * LANES + lane * 4);
            to[4 * i] = w.x, to[4 * i + 1] = w.y, to[4 * i + 2] = w.z, to[4 * i + 3] = w.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) to[i] = from[element_of(lane, i)];
    }
}

__device__ __forceinline__ void fetch_chunk(Chunk& chunk, const float* qkv, int channels, int n, int q_at, int k_at, int v_at,
                                            int n_rows) {
    for (int i = threadIdx.x; i < n * (DIM / 4); i += THREADS) {
        int t = i / (DIM / 4), c = (i % (DIM / 4)) * 4;
        copy_async16(&chunk.q[t][c], qkv + (long long)t * channels + q_at + c, true);
        copy_async16(&chunk.k[t][c], qkv + (long long)t * channels + k_at + c, true);
    }
    for (int i = threadIdx.x; i < n * (ROWS_A_BLOCK / 4); i += THREADS) {
        int t = i / (ROWS_A_BLOCK / 4), c = (i % (ROWS_A_BLOCK / 4)) * 4;
        if (c < n_rows) copy_async16(&chunk.v[t][c], qkv + (long long)t * channels + v_at + c, true);
    }
    commit_copies();
}

// One warp a token: unit q and k, their product, and the token's beta and decay.
__device__ __forceinline__ void prepare_chunk(Chunk& chunk, int n, const float* beta, const float* alpha, int heads, float a,
                                              float dt_bias, float eps) {
    int lane = threadIdx.x & 31;
    for (int t = threadIdx.x >> 5; t < n; t += THREADS / 32) {
        float qq = 0.0f, kk = 0.0f;
        for (int i = lane; i < DIM; i += 32) {
            qq = fmaf(chunk.q[t][i], chunk.q[t][i], qq);
            kk = fmaf(chunk.k[t][i], chunk.k[t][i], kk);
        }
        float q_scale = rsqrtf(warp_sum(qq) + eps) * rsqrtf((float)DIM), k_scale = rsqrtf(warp_sum(kk) + eps);
        float product = 0.0f;
        for (int i = lane; i < DIM; i += 32) {
            float q = chunk.q[t][i] * q_scale, k = chunk.k[t][i] * k_scale;
            chunk.q[t][i] = q;
            chunk.k[t][i] = k;
            product = fmaf(q, k, product);
        }
        product = warp_sum(product);
        if (lane == 0) {
            chunk.kq[t] = product;
            chunk.beta[t] = sigmoid(beta[(long long)t * heads]);
            chunk.decay[t] = expf(a * softplus(alpha[(long long)t * heads] + dt_bias));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_net(const float* __restrict__ qkv,        // [T, (2 Hk + Hv) DIM] after convolution and silu
              const float* __restrict__ beta,       // [T, Hv]
              const float* __restrict__ alpha,      // [T, Hv]
              const float* __restrict__ a,          // [Hv]
              const float* __restrict__ dt_bias,    // [Hv]
              float* __restrict__ out,              // [T, Hv * DIM]
              char* pool, const int* __restrict__ pages,  // [S, columns]
              const bool* __restrict__ fresh,             // [S]
              const int* __restrict__ query_start,        // [S + 1]
              long long page_bytes, int columns, int column, int n_key_heads, int n_value_heads, float eps) {
    __shared__ __align__(16) Chunk chunks[2];
    int seq = blockIdx.y, start = query_start[seq], n_tokens = query_start[seq + 1] - start;
    float* page = state_page(pool, page_bytes, pages, columns, seq, column);
    if (!page || n_tokens <= 0) return;
    int head = blockIdx.x / PARTS, first_row = blockIdx.x % PARTS * ROWS_A_BLOCK, n_rows = DIM - first_row;
    int key_head = TILED ? head % n_key_heads : head / (n_value_heads / n_key_heads);
    int channels = (2 * n_key_heads + n_value_heads) * DIM;
    int q_at = key_head * DIM, k_at = (n_key_heads + key_head) * DIM;
    int v_at = (2 * n_key_heads + head) * DIM + first_row;
    int lane = threadIdx.x % LANES, local = threadIdx.x / LANES * ROWS;
    bool mine = local < n_rows;  // a lane group has all of its ROWS rows or none: DIM is a multiple of ROWS
    float* state = page + ((long long)head * DIM + first_row + (mine ? local : 0)) * DIM;
    float s[ROWS][EACH];
    bool zero = fresh[seq];
    const float* in = qkv + (long long)start * channels;
    fetch_chunk(chunks[0], in, channels, min(CHUNK, n_tokens), q_at, k_at, v_at, n_rows);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (!zero) load_row(s[r], state + r * DIM, lane);
        else
#pragma unroll
            for (int i = 0; i < EACH; i++) s[r][i] = 0.0f;
    }
    for (int done = 0, stage = 0; done < n_tokens; done += CHUNK, stage ^= 1) {
        Chunk& chunk = chunks[stage];
        int n = min(CHUNK, n_tokens - done), next = min(CHUNK, n_tokens - done - CHUNK);
        if (next > 0) {
            fetch_chunk(chunks[stage ^ 1], in + (long long)(done + CHUNK) * channels, channels, next, q_at, k_at, v_at, n_rows);
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();
        long long token = start + done;
        prepare_chunk(chunk, n, beta + token * n_value_heads + head, alpha + token * n_value_heads + head, n_value_heads,
                      a[head], dt_bias[head], eps);
        __syncthreads();
        for (int t = 0; t < n; t++) {
            float k[EACH], q[EACH];
            load_row(k, chunk.k[t], lane);
            load_row(q, chunk.q[t], lane);
            float decay = chunk.decay[t];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float sk[2] = {0.0f, 0.0f}, sq[2] = {0.0f, 0.0f};
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    sk[i & 1] = fmaf(s[r][i], k[i], sk[i & 1]);
                    sq[i & 1] = fmaf(s[r][i], q[i], sq[i & 1]);
                }
                float p = group_sum<LANES>(sk[0] + sk[1]), o = group_sum<LANES>(sq[0] + sq[1]);
                float e = chunk.beta[t] * (chunk.v[t][local + r] - decay * p);
#pragma unroll
                for (int i = 0; i < EACH; i++) s[r][i] = fmaf(k[i], e, decay * s[r][i]);
                if (lane == 0 && mine)
                    out[((token + t) * n_value_heads + head) * DIM + first_row + local + r] = fmaf(e, chunk.kq[t], decay * o);
            }
        }
        __syncthreads();
    }
    if (!mine) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int i = 0; i < EACH; i++) state[r * DIM + element_of(lane, i)] = s[r][i];
}
