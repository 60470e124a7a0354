// Attention of many query tokens over paged keys and values, on tensor cores with an online softmax.
//
//   out[t, h] = sum_p softmax_p(scale q[t, h] . k[p]) v[p] / (1 + sink),  p visible: p <= t and t - p < window
//
// grid (tiles, n_head_kv). A tile is ROWS rows of one sequence and KV head; row = (token of the sequence) * group + head of
// the group, so K and V in shared memory serve all query heads. Sequence s has the tiles floor(start_s * group / ROWS) + s
// onwards: enough for its rows, found on the device by bisection. Sequences of at most `skip_tokens` tokens are left out.
// Keys are visited in blocks of KEYS from a multiple of 64, so a row's sums do not depend on how a prompt is cut.
//
// -D  KEY_DIM, VALUE_DIM (multiples of 16, up to 256), ELEMENT 0 f16, 1 bf16
// Flops: 2 (KEY_DIM + VALUE_DIM) per visible (query head, key). Bytes: K and V once per tile.

#include "attention/tile_mma.cuh"
#include "common/act_store.cuh"
#include "common/math.cuh"
#include "common/paged.cuh"
#include "common/warp.cuh"

#define ROWS 64
#define THREADS 128
#define KEYS (KEY_DIM > 128 || VALUE_DIM > 128 ? 32 : 64)
#define K_STRIDE (KEY_DIM + 8)  // elements; 16 bytes more than a row, so that eight rows meet all banks
#define V_STRIDE (VALUE_DIM + 8)
#define Q_IN_REGISTERS (KEY_DIM <= 128)

struct Tile {
    int token;     // first token of the sequence, as a row of q
    int n_rows;    // rows of the sequence
    int first;     // first row of the tile
    int seq;
};

__device__ __forceinline__ bool find_tile(const int* query_start, int n_seqs, int group, int index, Tile& tile) {
    int low = 0, high = n_seqs - 1;
    while (low < high) {
        int middle = (low + high + 1) >> 1;
        if ((int)((long long)query_start[middle] * group / ROWS) + middle <= index) low = middle; else high = middle - 1;
    }
    int start = query_start[low];
    tile.seq = low;
    tile.token = start;
    tile.n_rows = (query_start[low + 1] - start) * group;
    tile.first = (index - ((int)((long long)start * group / ROWS) + low)) * ROWS;
    return tile.first < tile.n_rows;
}

__device__ __forceinline__ void find_rows(const char** keys, const char** values, const KvView& kv, int seq, int head,
                                          int first, int begin, int end) {
    for (int i = threadIdx.x; i < KEYS; i += THREADS) {
        int p = first + i;
        const char* value = nullptr;
        keys[i] = p >= begin && p < end ? kv_rows(kv, seq, head, p, value) : nullptr;
        values[i] = value;
    }
}

template <int DIM, int STRIDE>
__device__ __forceinline__ void fetch(element_t* tile, const char* const* rows) {
    for (int i = threadIdx.x; i < KEYS * (DIM / 8); i += THREADS) {
        int row = i / (DIM / 8), chunk = (i % (DIM / 8)) * 8;
        const char* from = rows[row];
        copy_async16(tile + row * STRIDE + chunk, from + chunk * 2, from != nullptr);
    }
    commit_copies();
}

// s[16 rows x KEYS] = q k^T for the warp's rows
__device__ __forceinline__ void scores(float (&s)[KEYS / 8][4], const unsigned (&q)[KEY_DIM / 16][4], const element_t* q_tile,
                                       const element_t* k_tile) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < KEY_DIM / 16; k++) {
        unsigned a[4];
        if (Q_IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = q[k][i];
        } else {
            load_matrices(a, (const __half*)(q_tile + (warp * 16 + (lane & 15)) * K_STRIDE + k * 16 + (lane >> 4) * 8));
        }
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            unsigned b[4];
            int row = n * 16 + (lane & 7) + (lane >> 4) * 8, column = k * 16 + ((lane >> 3) & 1) * 8;
            load_matrices(b, (const __half*)(k_tile + row * K_STRIDE + column));
            multiply_add_elements(s[2 * n], a, b[0], b[1]);
            multiply_add_elements(s[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// Hides keys, turns scores to exponentials, updates maximum and sum of the thread's two rows; returns the shrink factors.
__device__ __forceinline__ void softmax(float (&s)[KEYS / 8][4], const int (&position)[2], int first_key, int window, bool mask,
                                        float (&maximum)[2], float (&sum)[2], float (&shrink)[2]) {
    int column = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float largest = NEGATIVE_INFINITY;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& v = s[n][r * 2 + i];
                int key = first_key + n * 8 + column + i;
                if (mask && (key > position[r] || (window > 0 && position[r] - key >= window))) v = NEGATIVE_INFINITY;
                largest = fmaxf(largest, v);
            }
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
        float now = fmaxf(maximum[r], largest), base = now == NEGATIVE_INFINITY ? 0.0f : now;
        shrink[r] = exp2f(maximum[r] - base);
        maximum[r] = now;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& v = s[n][r * 2 + i];
                v = exp2f(v - base);
                total += v;
            }
        sum[r] = fmaf(sum[r], shrink[r], total);  // of this thread's columns; lanes are added at the end
    }
}

// o += p v for the warp's rows
__device__ __forceinline__ void gather(float (&o)[VALUE_DIM / 8][4], const float (&p)[KEYS / 8][4], const element_t* v_tile) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        unsigned a[4] = {pack_pair(p[2 * k][0], p[2 * k][1]), pack_pair(p[2 * k][2], p[2 * k][3]),
                         pack_pair(p[2 * k + 1][0], p[2 * k + 1][1]), pack_pair(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
        for (int n = 0; n < VALUE_DIM / 16; n++) {
            unsigned b[4];
            int row = k * 16 + (lane & 15), column = n * 16 + (lane >> 4) * 8;
            load_matrices_transposed(b, v_tile + row * V_STRIDE + column);
            multiply_add_elements(o[2 * n], a, b[0], b[1]);
            multiply_add_elements(o[2 * n + 1], a, b[2], b[3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, KEY_DIM <= 128 ? 3 : 2)
    paged_prefill(const float* __restrict__ q,          // [T, n_head * q_stride]
                  const int* __restrict__ positions,    // [T]
                  const int* __restrict__ query_start,  // [S + 1]
                  const char* kv_base,                  // pool base + layer offset
                  const int* __restrict__ pages,        // [S, n_blocks]
                  const float* __restrict__ sinks,      // [n_head] or null
                  float* out,                           // [T, n_head * VALUE_DIM]
                  ACT_PARAMETERS,                       // quantised copy, where VALUE_DIM is a multiple of 32
                  long long page_bytes, int n_seqs, int n_blocks, int page_tokens, int n_head, int n_head_kv, int q_stride,
                  int window, int gated, int skip_tokens, float scale) {
    extern __shared__ __align__(16) char shared[];
    __shared__ const char* key_rows[2][KEYS];
    __shared__ const char* value_rows[2][KEYS];
    element_t* k_tile = (element_t*)shared;
    element_t* v_tile = k_tile + KEYS * K_STRIDE;
    element_t* q_tile = Q_IN_REGISTERS ? k_tile : v_tile + KEYS * V_STRIDE;  // in registers: staged where K and V come

    Tile tile;
    int group = n_head / n_head_kv, kv_head = blockIdx.y;
    // later tiles see more keys: they start first
    if (!find_tile(query_start, n_seqs, group, gridDim.x - 1 - blockIdx.x, tile) || tile.n_rows <= skip_tokens * group) return;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    KvView kv{kv_base, page_bytes, pages, n_blocks, page_tokens, n_head_kv, KEY_DIM * 2, VALUE_DIM * 2};
    for (int i = threadIdx.x; i < ROWS * KEY_DIM; i += THREADS) {
        int row = tile.first + i / KEY_DIM, column = i % KEY_DIM;
        float value = 0.0f;
        if (row < tile.n_rows)
            value = q[((long long)(tile.token + row / group) * n_head + kv_head * group + row % group) * q_stride + column] *
                    (scale * 1.4426950408889634f);
        store_element((char*)(q_tile + (i / KEY_DIM) * K_STRIDE), column, value);
    }
    int my_row[2], position[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        my_row[r] = tile.first + warp * 16 + (lane >> 2) + r * 8;
        position[r] = my_row[r] < tile.n_rows ? positions[tile.token + my_row[r] / group] : -1;
    }
    int last_row = min(tile.first + ROWS, tile.n_rows) - 1;
    int low = positions[tile.token + tile.first / group], high = positions[tile.token + last_row / group];
    int end = high + 1, begin = window > 0 ? max(0, low - window + 1) / 64 * 64 : 0;
    unsigned q_parts[KEY_DIM / 16][4];
    if (Q_IN_REGISTERS) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < KEY_DIM / 16; k++)
            load_matrices(q_parts[k], (const __half*)(q_tile + (warp * 16 + (lane & 15)) * K_STRIDE + k * 16 + (lane >> 4) * 8));
    }
    float o[VALUE_DIM / 8][4], maximum[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < VALUE_DIM / 8; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;

    int first_visible = window > 0 ? max(0, low - window + 1) : 0;
    find_rows(key_rows[0], value_rows[0], kv, tile.seq, kv_head, begin, first_visible, end);
    __syncthreads();
    fetch<KEY_DIM, K_STRIDE>(k_tile, key_rows[0]);
    int stage = 0;
    for (int key = begin; key < end; key += KEYS, stage ^= 1) {
        fetch<VALUE_DIM, V_STRIDE>(v_tile, value_rows[stage]);
        find_rows(key_rows[stage ^ 1], value_rows[stage ^ 1], kv, tile.seq, kv_head, key + KEYS, first_visible, end);
        wait_copies<1>();
        __syncthreads();
        float s[KEYS / 8][4], shrink[2];
        scores(s, q_parts, q_tile, k_tile);
        __syncthreads();
        fetch<KEY_DIM, K_STRIDE>(k_tile, key_rows[stage ^ 1]);
        bool mask = key + KEYS > low + 1 || (window > 0 && high - key >= window) || last_row - tile.first < ROWS - 1;
        softmax(s, position, key, window, mask, maximum, sum, shrink);
#pragma unroll
        for (int n = 0; n < VALUE_DIM / 8; n++) {
            o[n][0] *= shrink[0], o[n][1] *= shrink[0];
            o[n][2] *= shrink[1], o[n][3] *= shrink[1];
        }
        wait_copies<1>();
        __syncthreads();
        gather(o, s, v_tile);
        __syncthreads();
    }
    wait_copies<0>();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = sum[r];
        total += __shfl_xor_sync(FULL_WARP, total, 1);
        total += __shfl_xor_sync(FULL_WARP, total, 2);
        if (my_row[r] >= tile.n_rows) continue;
        int head = kv_head * group + my_row[r] % group;
        long long token = tile.token + my_row[r] / group;
        float factor = 1.0f / total;
        if (sinks) {
            float sink = sinks[head] * 1.4426950408889634f, top = fmaxf(maximum[r], sink);
            float lower = exp2f(maximum[r] - top);
            factor = lower / (total * lower + exp2f(sink - top));
        }
        const float* gate = q + (token * n_head + head) * q_stride + KEY_DIM;
        float* to = out + (token * n_head + head) * VALUE_DIM;
#pragma unroll
        for (int n = 0; n < VALUE_DIM / 8; n++) {
            int column = n * 8 + (lane & 3) * 2;
            float2 v = make_float2(o[n][r * 2] * factor, o[n][r * 2 + 1] * factor);
            if (gated) {
                v.x *= sigmoid(gate[column]);
                v.y *= sigmoid(gate[column + 1]);
            }
            *(float2*)(to + column) = v;
        }
    }
    if (!act_values) return;
    __syncthreads();
    int width = n_head * VALUE_DIM;
    for (int i = threadIdx.x; i < (last_row - tile.first + 1) * VALUE_DIM; i += THREADS) {
        int row = tile.first + i / VALUE_DIM, column = (kv_head * group + row % group) * VALUE_DIM + i % VALUE_DIM;
        long long token = tile.token + row / group;
        store_act_block(ACT_ARGUMENTS, token, width, column / ACT_BLOCK, out[token * width + column]);
    }
}
