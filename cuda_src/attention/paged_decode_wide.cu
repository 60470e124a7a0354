// Attention of single query tokens over paged keys and values, split over the context: the way for float32 elements,
// latent keys and odd head dims. paged_decode.cu is the fast way for 16-bit elements.
//
//   out[h] = sum_p softmax_p(scale q[h] . k[p]) v[p] / (1 + sink),  p visible: p <= t and t - p < window
//
// grid (n_head_kv * chunks, tokens, Z). A block serves the GROUP query heads of one KV head, so K and V are read once.
// The visible range, from a multiple of 64, is cut in at most MAX_SPLITS splits of whole 64-key units; their length
// depends on the token's own position only. Block z takes splits z, z + Z, ... Each split gives (maximum, sum, vector)
// per head, and these are folded in split order: by the block itself where Z = 1, else by the last block to finish,
// through `partials`. Both ways give the same bits, so a result does not depend on the grid, the batch or the pages.
//
// -D  KEY_DIM, VALUE_DIM (multiples of 8), GROUP (1 to 16), ELEMENT 0 f16, 1 bf16, 2 f32
//     VALUES_ARE_KEYS 1: no stored values, a key's first VALUE_DIM elements are its value (latent attention)
// Bytes moved: every visible K and V row once per KV head and token.

#include "attention/element.cuh"
#include "attention/merge.cuh"
#include "common/act_store.cuh"
#include "common/arrive.cuh"
#include "common/async_copy.cuh"
#include "common/follow.cuh"
#include "common/math.cuh"
#include "common/paged.cuh"
#include "common/warp.cuh"

#define THREADS (VALUE_DIM > 256 ? 256 : 128)
#define WARPS (THREADS / 32)
#define MAX_SPLITS 32
#define UNIT 64
#define KEY_BYTES (KEY_DIM * ELEMENT_BYTES)
#define VALUE_BYTES (VALUE_DIM * ELEMENT_BYTES)
// keys a tile: K and V of two tiles stay under 70 KiB
#if KEY_BYTES + VALUE_BYTES <= 512
#define TILE 64
#elif KEY_BYTES + VALUE_BYTES <= 1024
#define TILE 32
#else
#define TILE 16
#endif
#define K_STRIDE (KEY_BYTES + 16)  // bytes; 16 more than a row, so that a column of keys meets all banks
#if VALUES_ARE_KEYS
#define V_OFFSET 0
#define V_STRIDE K_STRIDE
#define STAGE_BYTES (TILE * K_STRIDE)
#else
#define V_OFFSET (TILE * K_STRIDE)
#define V_STRIDE VALUE_BYTES
#define STAGE_BYTES (TILE * (K_STRIDE + VALUE_BYTES))
#endif
// scores: PARTS neighbouring threads share a key, each takes every PARTS-th 16-byte chunk
#define PARTS (THREADS / TILE)
#define CHUNK (16 / ELEMENT_BYTES)
#define K_CHUNKS (KEY_BYTES / 16)
// vectors: a thread takes two value dims of HEADS_EACH heads
#define PAIRS (VALUE_DIM / 2)
#define HEAD_SETS (THREADS / PAIRS < GROUP ? THREADS / PAIRS : GROUP)
#define HEADS_EACH ((GROUP + HEAD_SETS - 1) / HEAD_SETS)

struct Shared {
    float q[GROUP][KEY_DIM];
    float weights[TILE][GROUP];
    float maximum[GROUP], sum[GROUP], rescale[GROUP];
    const char* key_rows[2][TILE];
    const char* value_rows[2][TILE];
    int is_last;
};

// Addresses of the rows of a tile; null for keys that are not visible or have no page, which are never read.
__device__ __forceinline__ void find_rows(Shared& s, int stage, const KvView& kv, int seq, int head, int first, int begin,
                                          int end) {
    for (int i = threadIdx.x; i < TILE; i += THREADS) {
        int p = first + i;
        const char* value = nullptr;
        const char* key = p >= begin && p < end ? kv_rows(kv, seq, head, p, value) : nullptr;
        s.key_rows[stage][i] = key;
        s.value_rows[stage][i] = value;
    }
}

__device__ __forceinline__ void fetch_tile(const Shared& s, int stage, char* tiles) {
    char* k = tiles + stage * STAGE_BYTES;
    for (int i = threadIdx.x; i < TILE * K_CHUNKS; i += THREADS) {
        int row = i / K_CHUNKS, chunk = (i % K_CHUNKS) * 16;
        const char* from = s.key_rows[stage][row];
        copy_async16(k + row * K_STRIDE + chunk, from + chunk, from != nullptr);
    }
    for (int i = threadIdx.x; !VALUES_ARE_KEYS && i < TILE * (VALUE_BYTES / 16); i += THREADS) {
        int row = i / (VALUE_BYTES / 16), chunk = (i % (VALUE_BYTES / 16)) * 16;
        const char* from = s.value_rows[stage][row];
        copy_async16(k + V_OFFSET + row * V_STRIDE + chunk, from + chunk, from != nullptr);
    }
    commit_copies();
}

// weights[key][head] = scaled score, -inf where the key may not be seen
__device__ __forceinline__ void score_tile(Shared& s, int stage, const char* tiles) {
    int key = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    const char* row = tiles + stage * STAGE_BYTES + key * K_STRIDE;
    float dot[GROUP];
#pragma unroll
    for (int h = 0; h < GROUP; h++) dot[h] = 0.0f;
#pragma unroll 2
    for (int c = part; c < K_CHUNKS; c += PARTS) {
        float2 k[CHUNK / 2];
        uint4 raw = *(const uint4*)(row + c * 16);
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) k[i] = load_pair((const char*)&raw + i * 2 * ELEMENT_BYTES);
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            const float4* q = (const float4*)&s.q[h][c * CHUNK];
#pragma unroll
            for (int i = 0; i < CHUNK / 4; i++) {
                float4 w = q[i];
                dot[h] = fmaf(w.x, k[2 * i].x, dot[h]);
                dot[h] = fmaf(w.y, k[2 * i].y, dot[h]);
                dot[h] = fmaf(w.z, k[2 * i + 1].x, dot[h]);
                dot[h] = fmaf(w.w, k[2 * i + 1].y, dot[h]);
            }
        }
    }
    bool seen = s.key_rows[stage][key] != nullptr;
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        float total = group_sum<PARTS>(dot[h]);
        if (part == 0) s.weights[key][h] = seen ? total : NEGATIVE_INFINITY;
    }
}

// Scores to exponentials, the running maximum and sum, and the factor by which the vectors so far shrink.
__device__ __forceinline__ void softmax_tile(Shared& s) {
    int lane = threadIdx.x & 31;
    for (int h = threadIdx.x >> 5; h < GROUP; h += WARPS) {
        float largest = NEGATIVE_INFINITY;
        for (int i = lane; i < TILE; i += 32) largest = fmaxf(largest, s.weights[i][h]);
        float before = s.maximum[h], now = fmaxf(before, warp_max(largest));
        float sum = 0.0f;
        for (int i = lane; i < TILE; i += 32) {
            float w = now == NEGATIVE_INFINITY ? 0.0f : exp2f(s.weights[i][h] - now);
            s.weights[i][h] = w;
            sum += w;
        }
        sum = warp_sum(sum);
        __syncwarp();  // all lanes have read the maximum
        if (lane == 0) {
            float shrink = before == NEGATIVE_INFINITY ? 0.0f : exp2f(before - now);
            s.rescale[h] = shrink;
            s.maximum[h] = now;
            s.sum[h] = __fmaf_rn(s.sum[h], shrink, sum);
        }
    }
}

__device__ __forceinline__ void gather_tile(const Shared& s, int stage, const char* tiles, int pair, int set,
                                            float2 (&vector)[HEADS_EACH]) {
    const char* v = tiles + stage * STAGE_BYTES + V_OFFSET + pair * 2 * ELEMENT_BYTES;
#pragma unroll
    for (int i = 0; i < HEADS_EACH; i++) {
        float shrink = s.rescale[min(set * HEADS_EACH + i, GROUP - 1)];
        vector[i].x *= shrink;
        vector[i].y *= shrink;
    }
#pragma unroll 4
    for (int key = 0; key < TILE; key++) {
        float2 value = load_pair(v + key * V_STRIDE);
#pragma unroll
        for (int i = 0; i < HEADS_EACH; i++) {
            float w = s.weights[key][min(set * HEADS_EACH + i, GROUP - 1)];
            vector[i].x = fmaf(w, value.x, vector[i].x);
            vector[i].y = fmaf(w, value.y, vector[i].y);
        }
    }
}

// out = vector / sum with the sink in the denominator, times sigmoid(gate)
__device__ __forceinline__ void finish_head(const Folded& f, float sink, bool has_sink, const float* gate, float* out,
                                            int pair) {
    float top = has_sink ? fmaxf(f.maximum, sink) : f.maximum;
    float shrink = f.sum > 0.0f ? exp2f(f.maximum - top) : 0.0f;
    float sum = f.sum * shrink + (has_sink ? exp2f(sink - top) : 0.0f);
    float factor = sum > 0.0f ? shrink / sum : 0.0f;
    float2 o = make_float2(f.vector.x * factor, f.vector.y * factor);
    if (gate) {
        o.x *= sigmoid(gate[2 * pair]);
        o.y *= sigmoid(gate[2 * pair + 1]);
    }
    *(float2*)(out + 2 * pair) = o;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    paged_decode_wide(const float* q,           // [T, n_head * q_stride]
                      const int* positions,     // [T]
                      const int* seq_of_token,  // [T]
                      const int* query_start,   // [S + 1]; used where by_sequence
                      const char* kv_base,      // pool base + layer offset
                      const int* pages,         // [S, n_blocks]
                      const float* sinks,       // [n_head] or null
                      float* partials,          // [tokens, n_head, MAX_SPLITS, VALUE_DIM + 2]; null where Z = 1
                      unsigned* arrivals,       // [tokens, gridDim.x], zero before and after
                      float* out,               // [T, n_head * VALUE_DIM]
                      ACT_PARAMETERS,           // quantised copy, where VALUE_DIM is a multiple of 32
                      long long page_bytes, int n_blocks, int page_tokens, int n_head, int n_head_kv, int q_stride, int window,
                      int gated, int by_sequence, float scale) {
    follow_predecessor();
    extern __shared__ __align__(16) char tiles[];
    __shared__ __align__(16) Shared s;
    int token = blockIdx.y, seq = blockIdx.y;
    if (by_sequence) {  // sequences that bring more than one token belong to the prefill kernel
        token = query_start[seq];
        if (query_start[seq + 1] - token != 1) return;
    } else {
        seq = seq_of_token[token];
    }
    int first_head = blockIdx.x * GROUP, kv_head = first_head / (n_head / n_head_kv);
    int end = positions[token] + 1, begin = window > 0 ? max(0, end - window) : 0;
    int aligned = begin / UNIT * UNIT, units = (end - aligned + UNIT - 1) / UNIT;
    int split_keys = (units + MAX_SPLITS - 1) / MAX_SPLITS * UNIT;
    int n_splits = units <= 0 ? 0 : (units * UNIT + split_keys - 1) / split_keys;
    KvView kv{kv_base, page_bytes, pages, n_blocks, page_tokens, n_head_kv, KEY_BYTES, VALUE_BYTES};
    const float* queries = q + ((long long)token * n_head + first_head) * q_stride;
    bool single = gridDim.z == 1;
    int pair = threadIdx.x % PAIRS, set = threadIdx.x / PAIRS;
    bool works = set < HEAD_SETS;
    Folded folded[HEADS_EACH];
#pragma unroll
    for (int i = 0; i < HEADS_EACH; i++) folded[i] = Folded{NEGATIVE_INFINITY, 0.0f, make_float2(0.0f, 0.0f)};

    if ((int)blockIdx.z < n_splits) {
        for (int i = threadIdx.x; i < GROUP * KEY_DIM; i += THREADS)
            s.q[i / KEY_DIM][i % KEY_DIM] = queries[(i / KEY_DIM) * q_stride + i % KEY_DIM] * (scale * 1.4426950408889634f);
    }
    for (int split = blockIdx.z; split < n_splits; split += gridDim.z) {
        int from = aligned + split * split_keys, to = min(end, from + split_keys);
        int n_tiles = (to - from + TILE - 1) / TILE;
        float2 vector[HEADS_EACH];
#pragma unroll
        for (int i = 0; i < HEADS_EACH; i++) vector[i] = make_float2(0.0f, 0.0f);
        for (int i = threadIdx.x; i < GROUP; i += THREADS) s.maximum[i] = NEGATIVE_INFINITY, s.sum[i] = 0.0f;
        find_rows(s, 0, kv, seq, kv_head, from, begin, to);
        __syncthreads();
        fetch_tile(s, 0, tiles);
        for (int tile = 0; tile < n_tiles; tile++) {
            int stage = tile & 1;
            if (tile + 1 < n_tiles) find_rows(s, stage ^ 1, kv, seq, kv_head, from + (tile + 1) * TILE, begin, to);
            __syncthreads();
            if (tile + 1 < n_tiles) {
                fetch_tile(s, stage ^ 1, tiles);
                wait_copies<1>();
            } else {
                wait_copies<0>();
            }
            __syncthreads();
            score_tile(s, stage, tiles);
            __syncthreads();
            softmax_tile(s);
            __syncthreads();
            if (works) gather_tile(s, stage, tiles, pair, set, vector);
        }
        if (works) {
#pragma unroll
            for (int i = 0; i < HEADS_EACH; i++) {
                int h = set * HEADS_EACH + i;
                if (h >= GROUP) break;
                if (single) {
                    fold(folded[i], s.maximum[h], s.sum[h], vector[i]);
                } else {
                    float* p = partials + (((long long)blockIdx.y * n_head + first_head + h) * MAX_SPLITS + split) * (VALUE_DIM + 2);
                    *(float2*)(p + 2 + 2 * pair) = vector[i];
                    if (pair == 0) p[0] = s.maximum[h], p[1] = s.sum[h];
                }
            }
        }
        __syncthreads();
    }
    if (!single) {
        if (!arrives_last(arrivals + blockIdx.y * gridDim.x + blockIdx.x, gridDim.z, &s.is_last)) return;
    }
#pragma unroll
    for (int i = 0; i < HEADS_EACH; i++) {
        int h = set * HEADS_EACH + i;
        if (!works || h >= GROUP) break;
        int head = first_head + h;
        if (!single)
            fold_all(folded[i], partials + ((long long)blockIdx.y * n_head + head) * MAX_SPLITS * (VALUE_DIM + 2), n_splits,
                     VALUE_DIM + 2, pair);
        const float* gate = gated ? queries + h * q_stride + KEY_DIM : nullptr;
        float sink = sinks ? sinks[head] * 1.4426950408889634f : 0.0f;
        finish_head(folded[i], sink, sinks != nullptr, gate, out + ((long long)token * n_head + head) * VALUE_DIM, pair);
    }
    if (!act_values) return;
    __syncthreads();
    int first = first_head * VALUE_DIM, width = n_head * VALUE_DIM;
    for (int c = threadIdx.x; c < GROUP * VALUE_DIM; c += THREADS)
        store_act_block(ACT_ARGUMENTS, token, width, (first + c) / ACT_BLOCK, out[(long long)token * width + first + c]);
}
