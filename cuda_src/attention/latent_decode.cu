// Attention of single query tokens over paged latent keys, whose first VALUE_DIM elements are the values too, on tensor
// cores, split over the context.
//
//   out[h] = sum_p softmax_p(scale q[h] . k[p]) k[p][:VALUE_DIM] / (1 + sink),  p visible: p <= t and t - p < window
//
// latent_decode  grid (chunks of GROUP heads, tokens, Z). The visible range, from a multiple of KEYS, is cut in at most
//                MAX_SPLITS splits of whole KEYS; their length depends on the token's own position only. Block z takes
//                splits z, z + Z, ... A row of the cache comes to shared memory once and serves GROUP heads, as key and as
//                value: a warp scores 8 of the KEYS keys (16 heads x 8 keys), then sums up an eighth of the value's dims
//                for all of them (16 heads x dims). Splits go to `partials`; where Z = 1 the block folds them itself.
// latent_fold    grid (n_head, tokens): folds the splits of a head, in order. Both ways give the same bits.
//
// -D  KEY_DIM (a multiple of 32), VALUE_DIM (a multiple of 128), GROUP (1 to 16), ELEMENT 0 f16, 1 bf16
// Bytes moved: every visible row once per chunk of heads and token.

#include "attention/merge.cuh"
#include "attention/tile_mma.cuh"
#include "common/act_store.cuh"
#include "common/follow.cuh"
#include "common/paged.cuh"

#define WARPS 8
#define THREADS (WARPS * 32)
#define KEYS (WARPS * 8)
#define MAX_SPLITS 32
#define STRIDE (KEY_DIM + 8)  // elements; 8 more than a row, so that a column of rows meets all banks
#define WEIGHT_STRIDE (KEYS + 8)
#define DIM_TILES (VALUE_DIM / 8 / WARPS)  // of 8 value dims, a warp

struct Shared {
    const char* rows[KEYS];
    float maximum[WARPS][16], sum[WARPS][16];
};

// The splits of a token's visible keys.
struct Splits {
    int begin, end, aligned, keys, n;
    __device__ __forceinline__ Splits(int position, int window) {
        end = position + 1, begin = window > 0 ? max(0, end - window) : 0;
        aligned = begin / KEYS * KEYS;
        int units = (end - aligned + KEYS - 1) / KEYS;
        keys = (units + MAX_SPLITS - 1) / MAX_SPLITS * KEYS;
        n = units <= 0 ? 0 : (units * KEYS + keys - 1) / keys;
    }
};

// What a thread has of a split: heads lane / 4 and 8 more; of each tile of dims 2 (lane % 4) and the next.
struct Running {
    float maximum[2], sum[2];  // the sum is of this lane's keys, then of all
    float vector[DIM_TILES][4];
};

__device__ __forceinline__ void clear(Running& r) {
#pragma unroll
    for (int h = 0; h < 2; h++) r.maximum[h] = NEGATIVE_INFINITY, r.sum[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < DIM_TILES; i++) r.vector[i][0] = r.vector[i][1] = r.vector[i][2] = r.vector[i][3] = 0.0f;
}

// The rows of keys first .. of the tile, on their way; what may not be seen is zeros.
__device__ __forceinline__ void fetch_rows(Shared& s, element_t* keys, const KvView& kv, int seq, int head, int first, int begin, int end) {
    if (threadIdx.x < KEYS) {
        int p = first + threadIdx.x;
        const char* unused;
        s.rows[threadIdx.x] = p >= begin && p < end ? kv_rows(kv, seq, head, p, unused) : nullptr;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < KEYS * (KEY_DIM / 8); i += THREADS) {
        int row = i / (KEY_DIM / 8), dim = i % (KEY_DIM / 8) * 8;
        const char* from = s.rows[row];
        copy_async16(keys + row * STRIDE + dim, from + dim * 2, from != nullptr);
    }
    commit_copies();
}

// GROUP rows of queries, scaled, as 16 rows of elements.
__device__ __forceinline__ void store_queries(element_t* to, const float* queries, int stride, float scale) {
    for (int i = threadIdx.x; i < 16 * (KEY_DIM / 4); i += THREADS) {
        int head = i / (KEY_DIM / 4), dim = i % (KEY_DIM / 4) * 4;
        float4 v = head < GROUP ? *(const float4*)(queries + (long long)head * stride + dim) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *(uint2*)(to + head * STRIDE + dim) = make_uint2(pack_pair(v.x * scale, v.y * scale), pack_pair(v.z * scale, v.w * scale));
    }
}

// score[i] of the warp's 8 keys: heads lane / 4 (+ 8 from i = 2 on), keys 2 (lane % 4) + i % 2. Even and odd steps along
// the key have sums of their own: half as long a chain of products.
__device__ __forceinline__ void score_keys(float (&score)[4], const element_t* queries, const element_t* keys) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const element_t* q = queries + lane % 16 * STRIDE + lane / 16 * 8;
    const element_t* k = keys + (warp * 8 + lane % 8) * STRIDE + lane / 8 * 8;
    float even[4] = {0.0f, 0.0f, 0.0f, 0.0f}, odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 6
    for (int step = 0; step < KEY_DIM; step += 32) {
        u32 a[4], a2[4], b[4];
        load_matrices(a, (const __half*)(q + step));
        load_matrices(a2, (const __half*)(q + step + 16));
        load_matrices(b, (const __half*)(k + step));
        multiply_add_elements(even, a, b[0], b[1]);
        multiply_add_elements(odd, a2, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) score[i] = even[i] + odd[i];
}

// Scores to weights in shared memory; maximum, sum and vectors so far shrink with them. All warps meet.
__device__ __forceinline__ void weigh(Running& r, Shared& s, float (&score)[4], element_t* weights) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = warp * 8 + lane % 4 * 2;
    bool seen[2] = {s.rows[column] != nullptr, s.rows[column + 1] != nullptr};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float largest = NEGATIVE_INFINITY;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (!seen[i]) score[2 * h + i] = NEGATIVE_INFINITY;
            largest = fmaxf(largest, score[2 * h + i]);
        }
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
        if (lane % 4 == 0) s.maximum[warp][lane / 4 + 8 * h] = largest;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float before = r.maximum[h], now = before;
#pragma unroll
        for (int w = 0; w < WARPS; w++) now = fmaxf(now, s.maximum[w][lane / 4 + 8 * h]);
        float base = now == NEGATIVE_INFINITY ? 0.0f : now, shrink = exp2f(before - base);
        float low = exp2f(score[2 * h] - base), high = exp2f(score[2 * h + 1] - base);
        r.maximum[h] = now;
        r.sum[h] = __fmaf_rn(r.sum[h], shrink, low + high);
        *(u32*)(weights + (lane / 4 + 8 * h) * WEIGHT_STRIDE + column) = pack_pair(low, high);
#pragma unroll
        for (int i = 0; i < DIM_TILES; i++) r.vector[i][2 * h] *= shrink, r.vector[i][2 * h + 1] *= shrink;
    }
    __syncthreads();
}

// vector += weights (16 heads x KEYS) times the keys' dims of this warp.
__device__ __forceinline__ void gather(Running& r, const element_t* weights, const element_t* keys) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const element_t* v = keys + lane % 16 * STRIDE + warp * DIM_TILES * 8 + lane / 16 * 8;
#pragma unroll
    for (int step = 0; step < KEYS; step += 16) {
        u32 a[4];
        load_matrices(a, (const __half*)(weights + lane % 16 * WEIGHT_STRIDE + lane / 16 * 8 + step));
#pragma unroll
        for (int i = 0; i < DIM_TILES; i += 2) {
            u32 b[4];
            load_matrices_transposed(b, v + step * STRIDE + i * 8);
            multiply_add_elements(r.vector[i], a, b[0], b[1]);
            multiply_add_elements(r.vector[i + 1], a, b[2], b[3]);
        }
    }
}

// The sum over all keys of a split, in the order of the warps.
__device__ __forceinline__ void add_sums(Running& r, Shared& s) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = r.sum[h];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        if (lane % 4 == 0) s.sum[warp][lane / 4 + 8 * h] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.sum[h] = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) r.sum[h] += s.sum[w][lane / 4 + 8 * h];
    }
}

// Whether this block has a token, and which, of which sequence.
__device__ __forceinline__ bool find_token(int by_sequence, const int* seq_of_token, const int* query_start, int& token, int& seq) {
    token = seq = blockIdx.y;
    if (by_sequence) {  // sequences that bring more than one token belong to the prefill kernel
        token = query_start[seq];
        return query_start[seq + 1] - token == 1;
    }
    seq = seq_of_token[token];
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    latent_decode(const float* q,           // [T, n_head * q_stride]
                  const int* positions,     // [T]
                  const int* seq_of_token,  // [T]
                  const int* query_start,   // [S + 1]; used where by_sequence
                  const char* kv_base,      // pool base + layer offset
                  const int* pages,         // [S, n_blocks]
                  const float* sinks,       // [n_head] or null
                  float* partials,          // [tokens, n_head, MAX_SPLITS, VALUE_DIM + 2]; null where Z = 1
                  float* out,               // [T, n_head * VALUE_DIM], written where Z = 1
                  ACT_PARAMETERS,           // quantised copy
                  long long page_bytes, int n_blocks, int page_tokens, int n_head, int n_head_kv, int q_stride, int window,
                  int gated, int by_sequence, float scale) {
    follow_predecessor();
    extern __shared__ __align__(16) char shared[];
    __shared__ __align__(16) Shared s;
    element_t *keys = (element_t*)shared, *queries = keys + KEYS * STRIDE, *weights = queries + 16 * STRIDE;
    int token, seq, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (!find_token(by_sequence, seq_of_token, query_start, token, seq)) return;
    int first_head = blockIdx.x * GROUP, kv_head = first_head / (n_head / n_head_kv);
    Splits splits(positions[token], window);
    KvView kv{kv_base, page_bytes, pages, n_blocks, page_tokens, n_head_kv, KEY_DIM * 2, 0};
    bool alone = gridDim.z == 1;
    if (!alone && (int)blockIdx.z >= splits.n) return;
    const float* mine = q + ((long long)token * n_head + first_head) * q_stride;
    Running folded;
    clear(folded);
    for (int split = blockIdx.z; split < splits.n; split += gridDim.z) {
        int from = splits.aligned + split * splits.keys, to = min(splits.end, from + splits.keys);
        Running r;
        clear(r);
        for (int first = from; first < to; first += KEYS) {
            fetch_rows(s, keys, kv, seq, kv_head, first, splits.begin, to);
            if (split == (int)blockIdx.z && first == from) store_queries(queries, mine, q_stride, scale * LOG2E);
            wait_copies<0>();
            __syncthreads();
            float score[4];
            score_keys(score, queries, keys);
            weigh(r, s, score, weights);
            gather(r, weights, keys);
            __syncthreads();
        }
        add_sums(r, s);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int head = lane / 4 + 8 * h;
            if (alone) {
                float top = fmaxf(folded.maximum[h], r.maximum[h]);
                float old = folded.maximum[h] == NEGATIVE_INFINITY ? 0.0f : exp2f(folded.maximum[h] - top);
                float add = r.maximum[h] == NEGATIVE_INFINITY ? 0.0f : exp2f(r.maximum[h] - top);
                folded.maximum[h] = top;
                folded.sum[h] = __fmaf_rn(folded.sum[h], old, __fmul_rn(r.sum[h], add));
#pragma unroll
                for (int i = 0; i < DIM_TILES; i++)
#pragma unroll
                    for (int k = 2 * h; k < 2 * h + 2; k++)
                        folded.vector[i][k] = __fmaf_rn(folded.vector[i][k], old, __fmul_rn(r.vector[i][k], add));
            } else if (head < GROUP) {
                float* p = partials + (((long long)blockIdx.y * n_head + first_head + head) * MAX_SPLITS + split) * (VALUE_DIM + 2);
                if (warp == 0 && lane % 4 == 0) *(float2*)p = make_float2(r.maximum[h], r.sum[h]);
#pragma unroll
                for (int i = 0; i < DIM_TILES; i++)
                    *(float2*)(p + 2 + (warp * DIM_TILES + i) * 8 + lane % 4 * 2) = make_float2(r.vector[i][2 * h], r.vector[i][2 * h + 1]);
            }
        }
    }
    if (!alone) return;
    int width = n_head * VALUE_DIM, first = first_head * VALUE_DIM;
    float* row = out + (long long)token * width + first;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int head = lane / 4 + 8 * h;
        if (head >= GROUP) break;
#pragma unroll
        for (int i = 0; i < DIM_TILES; i++) {
            int dim = (warp * DIM_TILES + i) * 8 + lane % 4 * 2;
            Folded f{folded.maximum[h], folded.sum[h], make_float2(folded.vector[i][2 * h], folded.vector[i][2 * h + 1])};
            const float* gate = gated ? mine + head * q_stride + KEY_DIM + dim : nullptr;
            *(float2*)(row + head * VALUE_DIM + dim) = finish_pair(f, sinks ? sinks + first_head + head : nullptr, gate);
        }
    }
    if (!act_values) return;
    __syncthreads();
    for (int c = threadIdx.x; c < GROUP * VALUE_DIM; c += THREADS)
        store_act_block(ACT_ARGUMENTS, token, width, (first + c) / ACT_BLOCK, row[c]);
}

extern "C" __global__ void __launch_bounds__(VALUE_DIM / 2)
    latent_fold(const float* q,           // [T, n_head * q_stride]; read where gated
                const int* positions,     // [T]
                const int* seq_of_token,  // [T]
                const int* query_start,   // [S + 1]; used where by_sequence
                const float* sinks,       // [n_head] or null
                const float* partials,    // [tokens, n_head, MAX_SPLITS, VALUE_DIM + 2]
                float* out,               // [T, n_head * VALUE_DIM]
                ACT_PARAMETERS,           // quantised copy
                int n_head, int q_stride, int window, int gated, int by_sequence) {
    follow_predecessor();
    __shared__ __align__(16) float values[VALUE_DIM];
    int token, seq, head = blockIdx.x, pair = threadIdx.x;
    if (!find_token(by_sequence, seq_of_token, query_start, token, seq)) return;
    Splits splits(positions[token], window);
    Folded f{NEGATIVE_INFINITY, 0.0f, make_float2(0.0f, 0.0f)};
    fold_all<16>(f, partials + ((long long)blockIdx.y * n_head + head) * MAX_SPLITS * (VALUE_DIM + 2), splits.n, VALUE_DIM + 2, pair);
    const float* gate = gated ? q + ((long long)token * n_head + head) * q_stride + KEY_DIM + 2 * pair : nullptr;
    float2 o = finish_pair(f, sinks ? sinks + head : nullptr, gate);
    int width = n_head * VALUE_DIM, first = head * VALUE_DIM;
    *(float2*)(out + (long long)token * width + first + 2 * pair) = o;
    if (!act_values) return;
    *(float2*)(values + 2 * pair) = o;
    __syncthreads();
    for (int c = threadIdx.x; c < VALUE_DIM; c += VALUE_DIM / 2)
        store_act_block(ACT_ARGUMENTS, token, width, (first + c) / ACT_BLOCK, values[c]);
}
