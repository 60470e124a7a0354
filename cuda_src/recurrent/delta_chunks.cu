// Gated delta rule over long pieces, 64 tokens at a time on tensor cores (the WY form of Yang et al. 2024, "Gated Delta
// Networks"; deltanet.cu has the rule and its notation, this file the case of prepared q, k, beta and g = log decay).
//
//   c_i = g_1 + .. + g_i inside the chunk;  D_ij = exp(c_i - c_j) for j <= i, of differences only
//   A = strict lower of beta_i D_ij k_i k_j;  T = (1 + A)^-1;  P = lower of D_ij q_i k_j
//   W = T [beta_i exp(c_i) k_i];  U = T [beta_i v_i];  F = [exp(c_last - c_i) k_i]
//   S' = M S + F^T U for M = exp(c_last) - F^T W;  o = (exp(c_i) q_i - P W) S + P U
//
// So a chunk maps the state before it to the state and the outputs after it: by one matrix and one sum, which are made for
// all chunks at once. What is left to do chunk after chunk is one product.
//
// delta_chunk_pairs   T and P (grid: chunks, value heads)
// delta_chunk_maps    from W the rows [M; exp(c) q - P W], from U the rows [F^T U; P U] (grid: chunks, value heads, 2)
// delta_chunk_states  S and o over the chunks of one sequence (grid: parts of SLICE value columns, value heads)
//
// All three work on one window of one sequence: `start` its first token, n_tokens its length. -D DIM, TILED: see deltanet.cu
// Scratch of a value head and chunk: T, P [64][64]; rows [64 + DIM][DIM] as tiles of a, sums [64 + DIM][DIM] as tiles of c.

#include "common/async_copy.cuh"
#include "common/follow.cuh"
#include "common/paged.cuh"
#include "common/warp.cuh"
#include "recurrent/float_mma.cuh"

#define CHUNK 64
#define THREADS 256
// Floats from row to row in shared memory: (g, t) or (t, g) of a tile lie in different banks.
#define WIDE (DIM + 4)
#define TALL (DIM + 8)
#define SQUARE (CHUNK + 4)
#define ROWS (CHUNK + DIM)  // of a map: first the state's, then the tokens'
#define SLICE 32
#define GROUPS (DIM / 64)  // of 64 columns

// c_i as the sum of two floats each, so that differences of large sums are exact to float32; by the first warp.
__device__ __forceinline__ void sum_gates(const float* gates, int stride, int n, float* high, float* low) {
    int lane = threadIdx.x;
    double first = 2 * lane < n ? gates[(long long)(2 * lane) * stride] : 0.0f;
    double both = first + (2 * lane + 1 < n ? gates[(long long)(2 * lane + 1) * stride] : 0.0f), sum = both;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        double before = __shfl_up_sync(FULL_WARP, sum, offset);
        if (lane >= offset) sum += before;
    }
    double c[2] = {sum - both + first, sum};
#pragma unroll
    for (int i = 0; i < 2; i++) high[2 * lane + i] = (float)c[i], low[2 * lane + i] = (float)(c[i] - (float)c[i]);
}

__device__ __forceinline__ float decay_between(const float* high, const float* low, int i, int j) {
    return expf((high[i] - high[j]) + (low[i] - low[j]));
}

// CHUNK rows of DIM floats, zeros beyond the n-th.
template <int WIDTH>
__device__ __forceinline__ void fetch_rows(float* to, const float* from, long long stride, int n) {
    for (int i = threadIdx.x; i < CHUNK * (DIM / 4); i += THREADS) {
        int row = i / (DIM / 4), c = i % (DIM / 4) * 4;
        copy_async16(to + row * WIDTH + c, from + (row < n ? row : 0) * stride + c, row < n);
    }
}

__device__ __forceinline__ void fetch_square(float* to, const float* from) {
    for (int i = threadIdx.x; i < CHUNK * CHUNK / 4; i += THREADS)
        copy_async16(to + i / (CHUNK / 4) * SQUARE + i % (CHUNK / 4) * 4, from + 4 * i, true);
}

struct Place {
    long long channels, index;  // floats of a token in qkv; which chunk of scratch
    const float *q, *k, *v;
    int n;
    long long first;  // of beta and gates
};

__device__ __forceinline__ Place place_of(const float* qkv, long long start, int n_tokens, int n_key_heads, int n_value_heads) {
    int head = blockIdx.y, key_head = TILED ? head % n_key_heads : head / (n_value_heads / n_key_heads);
    long long token = start + (long long)blockIdx.x * CHUNK;
    Place at;
    at.channels = (2 * n_key_heads + n_value_heads) * DIM;
    at.index = (long long)head * gridDim.x + blockIdx.x;
    at.q = qkv + token * at.channels + key_head * DIM;
    at.k = at.q + n_key_heads * DIM;
    at.v = qkv + token * at.channels + (2 * n_key_heads + head) * DIM;
    at.n = min(CHUNK, n_tokens - (int)blockIdx.x * CHUNK);
    at.first = token * n_value_heads + head;
    return at;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_chunk_pairs(const float* qkv,    // [T, (2 Hk + Hv) DIM], as delta_prepare left it
                      const float* beta,   // [T, Hv]
                      const float* gates,  // [T, Hv]: g
                      float* inverse,      // [Hv][chunks][64][64]: T
                      float* pairs,        // [Hv][chunks][64][64]: P
                      int start, int n_tokens, int n_key_heads, int n_value_heads) {
    follow_predecessor();
    extern __shared__ __align__(16) float shared[];
    float *k = shared, *q = k + CHUNK * WIDE, *a = q + CHUNK * WIDE, *high = a + CHUNK * SQUARE, *low = high + CHUNK;
    float* strength = low + CHUNK;
    Place at = place_of(qkv, start, n_tokens, n_key_heads, n_value_heads);
    fetch_rows<WIDE>(k, at.k, at.channels, at.n);
    fetch_rows<WIDE>(q, at.q, at.channels, at.n);
    commit_copies();
    if (threadIdx.x < 32) sum_gates(gates + at.first, n_value_heads, at.n, high, low);
    for (int i = threadIdx.x; i < CHUNK; i += THREADS)
        strength[i] = i < at.n ? beta[at.first + (long long)i * n_value_heads] : 0.0f;
    wait_copies<0>();
    __syncthreads();
    int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3, row = warp % 4 * 16;
    bool of_keys = warp < 4;
    const float* left = of_keys ? k : q;
    float c[8][4] = {};
    multiply_add_floats<8>(
        c, DIM, [&](int r, int i) { return left[(row + r) * WIDE + i]; }, [&](int i, int r) { return k[r * WIDE + i]; });
    pairs += at.index * CHUNK * CHUNK, inverse += at.index * CHUNK * CHUNK;
#pragma unroll
    for (int tile = 0; tile < 8; tile++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            int i = row + g + x / 2 * 8, j = 8 * tile + 2 * t + x % 2;
            bool counts = of_keys ? j < i : j <= i;
            float v = counts ? decay_between(high, low, i, j) * c[tile][x] : 0.0f;
            if (of_keys) a[i * SQUARE + j] = strength[i] * v;
            else pairs[i * CHUNK + j] = v;
        }
    __syncthreads();
    // (1 + A) T = 1, a column of T in each thread.
    if (threadIdx.x >= CHUNK) return;
    float column[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        float sum[4] = {i == (int)threadIdx.x ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            float4 w = *(const float4*)(a + i * SQUARE + j);  // zero from the diagonal on
            sum[0] = fmaf(-w.x, column[j], sum[0]);
            if (j + 1 < i) sum[1] = fmaf(-w.y, column[j + 1], sum[1]);
            if (j + 2 < i) sum[2] = fmaf(-w.z, column[j + 2], sum[2]);
            if (j + 3 < i) sum[3] = fmaf(-w.w, column[j + 3], sum[3]);
        }
        column[i] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        inverse[i * CHUNK + threadIdx.x] = column[i];
    }
}

// Four values of c, at rows `row` + (g, g + 8) and columns `column` + (2t, 2t + 1), to where delta_chunk_states reads them as
// tiles of a.
__device__ __forceinline__ void store_as_a(float* rows, int row, int column, const float (&c)[4]) {
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    float* tile = rows + (long long)(row / 16 * (DIM / 8) + column / 8) * 128 + (4 * g + (2 * t & 3)) * 4 + (t >> 1) * 2;
    *(float2*)tile = make_float2(c[0], c[2]);
    *(float2*)(tile + 4) = make_float2(c[1], c[3]);
}

__device__ __forceinline__ void store_as_c(float* sums, int row, int column, const float (&c)[4]) {
    float* tile = sums + (long long)(row / 16 * (DIM / 8) + column / 8) * 128 + (threadIdx.x & 31) * 4;
    *(float4*)tile = make_float4(c[0], c[1], c[2], c[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_chunk_maps(const float* qkv, const float* beta, const float* gates, const float* inverse, const float* pairs,
                     float* rows,  // [Hv][chunks][ROWS][DIM], tiles of a
                     float* sums,  // [Hv][chunks][ROWS][DIM], tiles of c
                     int start, int n_tokens, int n_key_heads, int n_value_heads) {
    follow_predecessor();
    extern __shared__ __align__(16) float shared[];
    float *k = shared, *x = k + CHUNK * TALL, *square = x + CHUNK * TALL, *high = square + CHUNK * SQUARE, *low = high + CHUNK;
    float *strength = low + CHUNK, *rest = strength + CHUNK;
    Place at = place_of(qkv, start, n_tokens, n_key_heads, n_value_heads);
    bool of_keys = blockIdx.z == 0;
    fetch_rows<TALL>(k, at.k, at.channels, at.n);
    fetch_rows<TALL>(x, of_keys ? at.k : at.v, at.channels, at.n);
    fetch_square(square, inverse + at.index * CHUNK * CHUNK);
    commit_copies();
    if (threadIdx.x < 32) sum_gates(gates + at.first, n_value_heads, at.n, high, low);
    __syncthreads();
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
        float b = i < at.n ? beta[at.first + (long long)i * n_value_heads] : 0.0f;
        strength[i] = of_keys ? b * expf(high[i]) : b;
        rest[i] = decay_between(high, low, CHUNK - 1, i);
    }
    wait_copies<0>();
    __syncthreads();
    for (int i = threadIdx.x; i < CHUNK * DIM; i += THREADS) {
        int row = i / DIM, c = i % DIM;
        x[row * TALL + c] *= strength[row];
        k[row * TALL + c] *= rest[row];
    }
    __syncthreads();
    // A warp makes 16 rows x 64 columns: of T X, of P (T X), then of F^T (T X).
    int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    int row = warp % 4 * 16, column = warp / 4 * 64;
    bool works = warp < 4 * GROUPS;
    auto from_square = [&](int r, int i) { return square[(row + r) * SQUARE + i]; };
    auto from_x = [&](int i, int r) { return x[i * TALL + column + r]; };
    {
        float c[8][4] = {};
        if (works) multiply_add_floats<8>(c, row + 16, from_square, from_x);  // T has nothing right of its diagonal
        __syncthreads();
        if (works) {
#pragma unroll
            for (int tile = 0; tile < 8; tile++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    *(float2*)(x + (row + g + 8 * i) * TALL + column + 8 * tile + 2 * t) =
                        make_float2(c[tile][2 * i], c[tile][2 * i + 1]);
        }
    }
    fetch_square(square, pairs + at.index * CHUNK * CHUNK);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    rows += at.index * ROWS * DIM, sums += at.index * ROWS * DIM;
    if (works) {
        float c[8][4] = {};
        multiply_add_floats<8>(c, row + 16, from_square, from_x);
#pragma unroll
        for (int tile = 0; tile < 8; tile++) {
            int to = column + 8 * tile;
            if (of_keys) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int token = row + g + 8 * i;
                    float2 q = make_float2(0.0f, 0.0f);
                    if (token < at.n) q = *(const float2*)(at.q + token * at.channels + to + 2 * t);
                    float before = expf(high[token]);
                    c[tile][2 * i] = fmaf(before, q.x, -c[tile][2 * i]);
                    c[tile][2 * i + 1] = fmaf(before, q.y, -c[tile][2 * i + 1]);
                }
                store_as_a(rows, DIM + row, to, c[tile]);
            } else {
                store_as_c(sums, DIM + row, to, c[tile]);
            }
        }
    }
    float whole = expf(high[CHUNK - 1]);
    for (int unit = warp; unit < DIM / 16 * GROUPS; unit += THREADS / 32) {
        row = unit % (DIM / 16) * 16, column = unit / (DIM / 16) * 64;
        float c[8][4] = {};
        multiply_add_floats<8>(c, CHUNK, [&](int r, int i) { return k[i * TALL + row + r]; }, from_x);
#pragma unroll
        for (int tile = 0; tile < 8; tile++) {
            int to = column + 8 * tile;
            if (!of_keys) {
                store_as_c(sums, row, to, c[tile]);
                continue;
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                c[tile][i] = (row + g + i / 2 * 8 == to + 2 * t + i % 2 ? whole : 0.0f) - c[tile][i];
            store_as_a(rows, row, to, c[tile]);
        }
    }
}

#define STATE_THREADS (ROWS * 2)  // a warp for 16 rows
#define STEPS (DIM / 8)
#define TILES (SLICE / 8)

// The state as tiles of b, both halves of two values beside each other: x, y of value t, z, w of value t + 4. Which float4
// a lane has is turned by its neighbours, so that what lies below each other in c is written to different banks.
__device__ __forceinline__ int slot_of(int step, int tile, int lane) {
    return (step * TILES + tile) * 32 + (lane ^ ((lane >> 3 & 1) << 2));
}

__device__ __forceinline__ void store_state(float4* state, int key, int column, float v) {
    u32 high, low;
    split_float(v, high, low);
    float2* pair = (float2*)(state + slot_of(key / 8, column / 8, column % 8 * 4 + key % 4)) + key % 8 / 4;
    *pair = make_float2(__uint_as_float(high), __uint_as_float(low));
}

extern "C" __global__ void __launch_bounds__(STATE_THREADS)
    delta_chunk_states(const float* rows, const float* sums,
                       float* out,  // [T, Hv * DIM]
                       char* pool, const int* pages,  // [S, columns]
                       const bool* fresh,             // [S]
                       long long page_bytes, int columns, int column, int seq, int start, int n_tokens, int continues,
                       int n_value_heads) {
    follow_predecessor();
    extern __shared__ __align__(16) float shared[];
    float4 *state = (float4*)shared, *after = state + STEPS * TILES * 32;
    float* page = state_page(pool, page_bytes, pages, columns, seq, column);
    if (!page) return;
    int head = blockIdx.y, first = blockIdx.x * SLICE, n_chunks = (n_tokens + CHUNK - 1) / CHUNK;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float* stored = page + ((long long)head * DIM + first) * DIM;
    const float* from = rows + (long long)head * n_chunks * ROWS * DIM + warp * (16 * DIM) + lane * 4;
    const float* added = sums + (long long)head * n_chunks * ROWS * DIM + warp * (16 * DIM) + first * 16 + lane * 4;
    float4 a[STEPS], next[TILES];
#pragma unroll
    for (int step = 0; step < STEPS; step++) a[step] = *(const float4*)(from + step * 128);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) next[tile] = *(const float4*)(added + tile * 128);
    bool zero = !continues && fresh[seq];
    for (int i = threadIdx.x; i < SLICE * DIM; i += STATE_THREADS)
        store_state(state, i % DIM, i / DIM, zero ? 0.0f : stored[i]);
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        __syncthreads();
        bool more = chunk + 1 < n_chunks;
        float c[TILES][4];
        from += ROWS * DIM, added += ROWS * DIM;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            c[tile][0] = next[tile].x, c[tile][1] = next[tile].y, c[tile][2] = next[tile].z, c[tile][3] = next[tile].w;
            if (more) next[tile] = *(const float4*)(added + tile * 128);
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const float values[4] = {a[step].x, a[step].y, a[step].z, a[step].w};
            u32 high[4], low[4];
            split_floats(values, high, low);
            if (more) a[step] = *(const float4*)(from + step * 128);  // of the next chunk, a whole chunk ahead
            float4 b[TILES];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) b[tile] = state[slot_of(step, tile, lane)];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                multiply_add_tf32(c[tile], high, __float_as_uint(b[tile].y), __float_as_uint(b[tile].w));
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                multiply_add_tf32(c[tile], low, __float_as_uint(b[tile].x), __float_as_uint(b[tile].z));
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                multiply_add_tf32(c[tile], high, __float_as_uint(b[tile].x), __float_as_uint(b[tile].z));
        }
        bool of_state = warp < DIM / 16;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int row = warp * 16 + g + 8 * i, value = 8 * tile + 2 * t;
                float2 v = make_float2(c[tile][2 * i], c[tile][2 * i + 1]);
                if (!of_state) {
                    int token = chunk * CHUNK + row - DIM;
                    if (token < n_tokens)
                        *(float2*)(out + ((long long)(start + token) * n_value_heads + head) * DIM + first + value) = v;
                } else if (more) {
                    store_state(after, row, value, v.x);
                    store_state(after, row, value + 1, v.y);
                } else {
                    stored[value * DIM + row] = v.x;
                    stored[(value + 1) * DIM + row] = v.y;
                }
            }
        float4* done = state;
        state = after, after = done;
    }
}
