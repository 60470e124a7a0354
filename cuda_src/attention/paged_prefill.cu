// Attention of many query tokens over paged keys and values, on tensor cores with an online softmax.
//
//   out[t, h] = sum_p softmax_p(scale q[t, h] . k[p]) v[p] / (1 + sink),  p visible: p <= t and t - p < window
//
// grid (tiles, n_head_kv). A tile is ROWS rows of one sequence and KV head; row = (token of the sequence) * group + head of
// the group, so K and V in shared memory serve all query heads. Sequence s has the tiles floor(start_s * group / ROWS) + s
// onwards: enough for its rows, found on the device by bisection. Sequences of at most `skip_tokens` tokens are left out.
// Keys are visited in blocks of KEYS from a multiple of 64, so a row's sums do not depend on how a prompt is cut. Two
// stages of K and V: one is copied while the other is worked on, with one barrier a block of keys.
//
// -D  KEY_DIM, VALUE_DIM (multiples of 16), ELEMENT 0 f16, 1 bf16, KEYS (32 or 64), WARP_TILES (16-row tiles of a warp, 1 or
//     2), MIN_BLOCKS on a multiprocessor
//     VALUE_PARTS: warps that share their rows, each with a part of the value dims (256 of them fill a warp's registers);
//     each makes all scores of the rows itself
//     VALUES_ARE_KEYS 1: no stored values, a key's first VALUE_DIM elements are its value (latent attention)
// Flops: 2 (KEY_DIM + VALUE_DIM) per visible (query head, key). Bytes: K and V once per tile.

#include "attention/tile_mma.cuh"
#include "common/act_store.cuh"
#include "common/follow.cuh"
#include "common/math.cuh"
#include "common/paged.cuh"
#include "common/warp.cuh"

#define ROW_WARPS 4
#define THREADS (32 * ROW_WARPS * VALUE_PARTS)
#define WARP_ROWS (16 * WARP_TILES)
#define ROWS (ROW_WARPS * WARP_ROWS)
#define PART_DIM (VALUE_DIM / VALUE_PARTS)
#define ROW_WARP (VALUE_PARTS == 1 ? (int)threadIdx.x >> 5 : ((int)threadIdx.x >> 5) % ROW_WARPS)
#define FIRST_DIM (VALUE_PARTS == 1 ? 0 : ((int)threadIdx.x >> 5) / ROW_WARPS * PART_DIM)  // of the values
#define K_STRIDE (KEY_DIM + 8)  // elements; 16 bytes more than a row, so that eight rows meet all banks
#if VALUES_ARE_KEYS
#define V_STRIDE K_STRIDE
#define V_OFFSET 0
#define STAGE (KEYS * K_STRIDE)
#else
#define V_STRIDE (VALUE_DIM + 8)
#define V_OFFSET (KEYS * K_STRIDE)
#define STAGE (KEYS * (K_STRIDE + V_STRIDE))
#endif
#define Q_IN_REGISTERS (KEY_DIM <= 128 && WARP_TILES == 1)  // else in shared memory behind the stages

struct Tile {
    int token;   // first token of the sequence, as a row of q
    int n_rows;  // rows of the sequence
    int first;   // first row of the tile
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

struct Rows {
    const char *keys[KEYS], *values[KEYS];  // null: not visible to any row, or no page
};

__device__ __forceinline__ void find_rows(Rows& rows, const KvView& kv, int seq, int head, int first, int begin, int end) {
    for (int i = threadIdx.x; i < KEYS; i += THREADS) {
        int p = first + i;
        const char* value = nullptr;
        rows.keys[i] = p >= begin && p < end ? kv_rows(kv, seq, head, p, value) : nullptr;
        rows.values[i] = value;
    }
}

template <int DIM, int STRIDE>
__device__ __forceinline__ void fetch_rows(element_t* tile, const char* const* rows) {
    for (int i = threadIdx.x; i < KEYS * (DIM / 8); i += THREADS) {
        int row = i / (DIM / 8), chunk = (i % (DIM / 8)) * 8;
        const char* from = rows[row];
        copy_async16(tile + row * STRIDE + chunk, from + chunk * 2, from != nullptr);
    }
}

__device__ __forceinline__ void fetch(element_t* stage, const Rows& rows) {
    fetch_rows<KEY_DIM, K_STRIDE>(stage, rows.keys);
    if (!VALUES_ARE_KEYS) fetch_rows<VALUE_DIM, V_STRIDE>(stage + V_OFFSET, rows.values);
    commit_copies();
}

// Scaled queries of the tile as elements; a thread has part of one row.
__device__ __forceinline__ void load_queries(element_t* q_tile, const float* q, const Tile& tile, int group, int n_head,
                                             int first_head, int stride, float scale) {
    const int lanes = THREADS / ROWS > 0 ? THREADS / ROWS : 1;
    int local = threadIdx.x / lanes, row = tile.first + local;
    bool inside = row < tile.n_rows;
    const float* from = q + ((long long)(tile.token + (inside ? row / group : 0)) * n_head + first_head + row % group) * stride;
    for (int c = threadIdx.x % lanes * 4; c < KEY_DIM; c += lanes * 4) {
        float4 v = inside ? *(const float4*)(from + c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *(uint2*)(q_tile + local * K_STRIDE + c) = make_uint2(pack_pair(v.x * scale, v.y * scale), pack_pair(v.z * scale, v.w * scale));
    }
}

// The left side of q k^T: 16 rows, dims 16 k .. + 15.
__device__ __forceinline__ void query_matrix(u32 (&a)[4], const element_t* q_tile, int tile, int k) {
    int lane = threadIdx.x & 31, row = ROW_WARP * WARP_ROWS + tile * 16 + (lane & 15);
    load_matrices(a, (const __half*)(q_tile + row * K_STRIDE + k * 16 + (lane >> 4) * 8));
}

// s[rows of the warp x KEYS] = q k^T
__device__ __forceinline__ void scores(float (&s)[WARP_TILES][KEYS / 8][4], const u32 (&q)[KEY_DIM / 16][4], const element_t* q_tile,
                                       const element_t* k_tile) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < KEY_DIM / 16; k++) {
        u32 a[WARP_TILES][4];
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++) {
            if (Q_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[m][i] = q[k][i];
            } else {
                query_matrix(a[m], q_tile, m, k);
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 b[4];
            int row = n * 16 + (lane & 7) + (lane >> 4) * 8, column = k * 16 + ((lane >> 3) & 1) * 8;
            load_matrices(b, (const __half*)(k_tile + row * K_STRIDE + column));
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++) {
                multiply_add_elements(s[m][2 * n], a[m], b[0], b[1]);
                multiply_add_elements(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
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

// o += p v for the warp's rows; v_tile: from the warp's first value dim
__device__ __forceinline__ void gather(float (&o)[WARP_TILES][PART_DIM / 8][4], const float (&p)[WARP_TILES][KEYS / 8][4],
                                       const element_t* v_tile) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        u32 a[WARP_TILES][4];
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++) {
            a[m][0] = pack_pair(p[m][2 * k][0], p[m][2 * k][1]), a[m][1] = pack_pair(p[m][2 * k][2], p[m][2 * k][3]);
            a[m][2] = pack_pair(p[m][2 * k + 1][0], p[m][2 * k + 1][1]), a[m][3] = pack_pair(p[m][2 * k + 1][2], p[m][2 * k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < PART_DIM / 16; n++) {
            u32 b[4];
            load_matrices_transposed(b, v_tile + (k * 16 + (lane & 15)) * V_STRIDE + n * 16 + (lane >> 4) * 8);
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++) {
                multiply_add_elements(o[m][2 * n], a[m], b[0], b[1]);
                multiply_add_elements(o[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    paged_prefill(const float* q,          // [T, n_head * q_stride]
                  const int* positions,    // [T]
                  const int* query_start,  // [S + 1]
                  const char* kv_base,     // pool base + layer offset
                  const int* pages,        // [S, n_blocks]
                  const float* sinks,      // [n_head] or null
                  float* out,              // [T, n_head * VALUE_DIM]
                  ACT_PARAMETERS,          // quantised copy, where VALUE_DIM is a multiple of 32
                  long long page_bytes, int n_seqs, int n_blocks, int page_tokens, int n_head, int n_head_kv, int q_stride,
                  int window, int gated, int skip_tokens, float scale) {
    follow_predecessor();
    extern __shared__ __align__(16) element_t shared[];
    __shared__ __align__(16) Rows rows[2];
    element_t* q_tile = Q_IN_REGISTERS ? shared : shared + 2 * STAGE;  // in registers: staged where K and V come

    Tile tile;
    int group = n_head / n_head_kv, kv_head = blockIdx.y;
    // later tiles see more keys: they start first
    if (!find_tile(query_start, n_seqs, group, gridDim.x - 1 - blockIdx.x, tile) || tile.n_rows <= skip_tokens * group) return;
    int lane = threadIdx.x & 31, warp = ROW_WARP, first_dim = FIRST_DIM;
    KvView kv{kv_base, page_bytes, pages, n_blocks, page_tokens, n_head_kv, KEY_DIM * 2, VALUE_DIM * 2};
    load_queries(q_tile, q, tile, group, n_head, kv_head * group, q_stride, scale * 1.4426950408889634f);
    int my_row[WARP_TILES][2], position[WARP_TILES][2];
    float o[WARP_TILES][PART_DIM / 8][4], maximum[WARP_TILES][2], sum[WARP_TILES][2];
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = tile.first + warp * WARP_ROWS + m * 16 + (lane >> 2) + r * 8;
            my_row[m][r] = row;
            position[m][r] = row < tile.n_rows ? positions[tile.token + row / group] : -1;
            maximum[m][r] = NEGATIVE_INFINITY, sum[m][r] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < PART_DIM / 8; n++) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.0f;
    }
    int last_row = min(tile.first + ROWS, tile.n_rows) - 1;
    int low = positions[tile.token + tile.first / group], high = positions[tile.token + last_row / group];
    int end = high + 1, first_visible = window > 0 ? max(0, low - window + 1) : 0, begin = first_visible / 64 * 64;
    u32 q_parts[KEY_DIM / 16][4];
    find_rows(rows[0], kv, tile.seq, kv_head, begin, first_visible, end);
    find_rows(rows[1], kv, tile.seq, kv_head, begin + KEYS, first_visible, end);
    __syncthreads();
    if (Q_IN_REGISTERS) {
#pragma unroll
        for (int k = 0; k < KEY_DIM / 16; k++) query_matrix(q_parts[k], q_tile, 0, k);
        __syncthreads();
    }
    fetch(shared, rows[0]);
    int stage = 0;
    for (int key = begin; key < end; key += KEYS, stage ^= 1) {
        wait_copies<0>();
        __syncthreads();  // this stage has come, and the other is free
        const element_t* k_tile = shared + stage * STAGE;
        if (key + KEYS < end) {
            fetch(shared + (stage ^ 1) * STAGE, rows[stage ^ 1]);
            find_rows(rows[stage], kv, tile.seq, kv_head, key + 2 * KEYS, first_visible, end);
        }
        float s[WARP_TILES][KEYS / 8][4];
        scores(s, q_parts, q_tile, k_tile);
        bool mask = key + KEYS > low + 1 || (window > 0 && high - key >= window) || last_row - tile.first < ROWS - 1;
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++) {
            float shrink[2];
            softmax(s[m], position[m], key, window, mask, maximum[m], sum[m], shrink);
#pragma unroll
            for (int n = 0; n < PART_DIM / 8; n++) {
                o[m][n][0] *= shrink[0], o[m][n][1] *= shrink[0];
                o[m][n][2] *= shrink[1], o[m][n][3] *= shrink[1];
            }
        }
        gather(o, s, k_tile + V_OFFSET + first_dim);
    }
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = sum[m][r];
            total += __shfl_xor_sync(FULL_WARP, total, 1);
            total += __shfl_xor_sync(FULL_WARP, total, 2);
            if (my_row[m][r] >= tile.n_rows) continue;
            int head = kv_head * group + my_row[m][r] % group;
            long long token = tile.token + my_row[m][r] / group;
            float factor = 1.0f / total;
            if (sinks) {
                float sink = sinks[head] * 1.4426950408889634f, top = fmaxf(maximum[m][r], sink);
                float lower = exp2f(maximum[m][r] - top);
                factor = lower / (total * lower + exp2f(sink - top));
            }
            const float* gate = q + (token * n_head + head) * q_stride + KEY_DIM;
            float* to = out + (token * n_head + head) * VALUE_DIM;
#pragma unroll
            for (int n = 0; n < PART_DIM / 8; n++) {
                int column = first_dim + n * 8 + (lane & 3) * 2;
                float2 v = make_float2(o[m][n][r * 2] * factor, o[m][n][r * 2 + 1] * factor);
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
