// Attention of single query tokens over paged 16-bit keys and values, on tensor cores, split over the context.
//
//   out[h] = sum_p softmax_p(scale q[h] . k[p]) v[p] / (1 + sink),  p visible: p <= t and t - p < window
//
// grid (n_head_kv * chunks, tokens, Z). A block serves the GROUP query heads of one KV head, so K and V are read once,
// straight into registers. The visible range, from a multiple of 64, is cut in at most MAX_SPLITS splits of whole UNITs;
// their length depends on the token's own position only. Block z takes splits z, z + Z, ... In a split, part w of S takes
// the pieces w, w + S, ... of 16 keys, with its own running maximum; a warp has PARTS of the S = WARPS * PARTS parts, one
// after the other. Everything is folded in one order: parts of a split, then splits; by the block itself where Z = 1 or one
// split is all, else by the last block to finish, through `partials`. All ways give the same bits, so a result depends on S,
// and not on the grid, the batch or the pages.
//
// Scores are K q^T (16 keys x 8 heads), so that eight heads fill a tile; a lane's 16 bytes of a key row are four of the
// matrix's k-pairs, in the same order for K and q. Vectors are V^T p (16 dims x 8 heads), pairs of keys put together by
// byte permutes.
//
// -D  KEY_DIM, VALUE_DIM (multiples of 8, up to 256), GROUP (1 to 16), ELEMENT 0 f16, 1 bf16
//     WARPS of a block, MIN_BLOCKS on a multiprocessor, UNIT (keys, a multiple of 64), PARTS
//     PREPARE 1: q, k and v are as they came out of their matrices, and the block does what attention/kv_append.cu would
//     (NORM_KIND 0 1, NORM_LAST, ADJACENT as there): its query heads go to shared memory; the block whose split has the
//     token itself keeps key and value there too, where they are read, and writes them to their pages. All other rows are
//     of earlier steps, so the first of them are asked for before the kernel before this one has ended.
// Bytes moved: every visible K and V row once per KV head and token.

#include "attention/merge.cuh"
#include "attention/prepare_block.cuh"
#include "attention/tile_mma.cuh"
#include "common/act_store.cuh"
#include "common/arrive.cuh"
#include "common/follow.cuh"
#include "common/math.cuh"
#include "common/paged.cuh"
#include "common/warp.cuh"

#define MAX_SPLITS 32
#define PIECE 16
#define SPLIT_PARTS (WARPS * PARTS)
#define STEP (SPLIT_PARTS * PIECE)  // keys from piece to piece of a part
#define HEAD_TILES ((GROUP + 7) / 8)
#define K_BLOCKS ((KEY_DIM + 31) / 32)
#define V_BLOCKS ((VALUE_DIM + 63) / 64)
// Where a block has its multiprocessor alone, the next piece's rows come while one is worked on.
#define DEEP (MIN_BLOCKS == 1 && KEY_DIM <= 128 && VALUE_DIM <= 128 && GROUP <= 8)
// Elsewhere the first keys come so where they have room in registers beside the preparation of the queries.
#define EARLY_KEYS (PREPARE && !DEEP && KEY_DIM <= 128)
#define PAIRS (VALUE_DIM / 2)
#define SPLIT_FLOATS (VALUE_DIM + 2)  // maximum, sum, vector of a head
#define PAIRS_EACH ((GROUP * PAIRS + THREADS - 1) / THREADS)

// What a warp has of its pieces: per head tile the lane's two heads, 2 (lane % 4) and the next.
struct Running {
    float maximum[HEAD_TILES][2], sum[HEAD_TILES][2];  // the sum is of this lane's keys
    float vector[HEAD_TILES][V_BLOCKS * 4][4];
};

struct Shared {
    float maximum[SPLIT_PARTS][HEAD_TILES * 8], sum[SPLIT_PARTS][HEAD_TILES * 8];
    int is_last;
};

__device__ __forceinline__ uint4 load16(const char* row, int byte, bool inside) {
    if (!row || !inside) return make_uint4(0, 0, 0, 0);
#if PREPARE
    int4 v = load_early((const int4*)(row + byte));
    return make_uint4(v.x, v.y, v.z, v.w);
#else
    return load_settled((const uint4*)(row + byte));
#endif
}

__device__ __forceinline__ const char* lane_pointer(const char* p, int lane) {
    return (const char*)__shfl_sync(FULL_WARP, (unsigned long long)p, lane);
}

// Queries as the right side of K q^T: lane l has head l / 4, dims 8 (l % 4) .. + 7 of each 32.
__device__ __forceinline__ void load_queries(u32 (&q)[HEAD_TILES][K_BLOCKS][4], const float* queries, int stride, float scale) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int t = 0; t < HEAD_TILES; t++)
#pragma unroll
        for (int b = 0; b < K_BLOCKS; b++) {
            int head = t * 8 + lane / 4, dim = b * 32 + lane % 4 * 8;
            bool inside = head < GROUP && dim < KEY_DIM;
            const float4* from = (const float4*)(queries + head * stride + dim);
            float4 x = inside ? from[0] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            float4 y = inside ? from[1] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            q[t][b][0] = pack_pair(x.x * scale, x.y * scale), q[t][b][1] = pack_pair(x.z * scale, x.w * scale);
            q[t][b][2] = pack_pair(y.x * scale, y.y * scale), q[t][b][3] = pack_pair(y.z * scale, y.w * scale);
        }
}

// One piece of 16 keys: scores, the running maximum and sum, and weights as the right side of V^T p. The lane's keys are
// lane / 4 and 8 more.
__device__ __forceinline__ void weigh(Running& r, const u32 (&q)[HEAD_TILES][K_BLOCKS][4], const uint4 (&k)[K_BLOCKS][2], bool seen0,
                                      bool seen1, u32 (&p)[HEAD_TILES][2]) {
#pragma unroll
    for (int t = 0; t < HEAD_TILES; t++) {
        float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int b = 0; b < K_BLOCKS; b++) {
            u32 first[4] = {k[b][0].x, k[b][1].x, k[b][0].y, k[b][1].y};
            u32 second[4] = {k[b][0].z, k[b][1].z, k[b][0].w, k[b][1].w};
            multiply_add_elements(s, first, q[t][b][0], q[t][b][1]);
            multiply_add_elements(s, second, q[t][b][2], q[t][b][3]);
        }
        float weight[4], shrink[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float low = seen0 ? s[h] : NEGATIVE_INFINITY, high = seen1 ? s[2 + h] : NEGATIVE_INFINITY;
            float largest = fmaxf(low, high);
#pragma unroll
            for (int offset = 4; offset < 32; offset <<= 1)
                largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, offset));
            float before = r.maximum[t][h], now = fmaxf(before, largest), base = now == NEGATIVE_INFINITY ? 0.0f : now;
            shrink[h] = exp2f(before - base);
            weight[h] = exp2f(low - base), weight[2 + h] = exp2f(high - base);
            r.maximum[t][h] = now;
            r.sum[t][h] = __fmaf_rn(r.sum[t][h], shrink[h], weight[h] + weight[2 + h]);
        }
        p[t][0] = transpose_matrix(pack_pair(weight[0], weight[1]));
        p[t][1] = transpose_matrix(pack_pair(weight[2], weight[3]));
#pragma unroll
        for (int i = 0; i < V_BLOCKS * 4; i++) {
            r.vector[t][i][0] *= shrink[0], r.vector[t][i][1] *= shrink[1];
            r.vector[t][i][2] *= shrink[0], r.vector[t][i][3] *= shrink[1];
        }
    }
}

// vector += V^T p. The lane's values are of keys 2 (lane % 4), + 1, + 8, + 9, dims 8 (lane / 4) .. + 7 of each 64.
__device__ __forceinline__ void gather(Running& r, const u32 (&p)[HEAD_TILES][2], const uint4 (&v)[V_BLOCKS][4]) {
#pragma unroll
    for (int b = 0; b < V_BLOCKS; b++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            auto word = [&](int key) { return i == 0 ? v[b][key].x : i == 1 ? v[b][key].y : i == 2 ? v[b][key].z : v[b][key].w; };
            u32 a[4] = {__byte_perm(word(0), word(1), 0x5410), __byte_perm(word(0), word(1), 0x7632),
                        __byte_perm(word(2), word(3), 0x5410), __byte_perm(word(2), word(3), 0x7632)};
#pragma unroll
            for (int t = 0; t < HEAD_TILES; t++) multiply_add_elements(r.vector[t][b * 4 + i], a, p[t][0], p[t][1]);
        }
}

__device__ __forceinline__ void load_values(uint4 (&v)[V_BLOCKS][4], const char* value_row) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const char* row = lane_pointer(value_row, lane % 4 * 2 + (i & 1) + (i >> 1) * 8);
#pragma unroll
        for (int b = 0; b < V_BLOCKS; b++) {
            int dim = b * 64 + lane / 4 * 8;
            v[b][i] = load16(row, dim * 2, dim < VALUE_DIM);
        }
    }
}

// Rows of the key first + lane % 16; null where it may not be seen.
struct PieceRows {
    const char *key, *value;
};

__device__ __forceinline__ PieceRows find_piece(const KvView& kv, int seq, int head, int first, int begin, int end) {
    int position = first + (threadIdx.x & 15);
    PieceRows rows{nullptr, nullptr};
    if (position >= begin && position < end) rows.key = kv_rows<PREPARE>(kv, seq, head, position, rows.value);
    return rows;
}

// The rows of a piece; values of wide heads come after the scores, since both do not fit in registers.
struct KeyValues {
    uint4 k[K_BLOCKS][2], v[V_BLOCKS][4];
    bool seen[2];  // the lane's keys
};

__device__ __forceinline__ void load_keys(KeyValues& p, const PieceRows& rows) {
    int lane = threadIdx.x & 31;
    const char* keys[2] = {lane_pointer(rows.key, lane / 4), lane_pointer(rows.key, lane / 4 + 8)};
#pragma unroll
    for (int b = 0; b < K_BLOCKS; b++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int dim = b * 32 + lane % 4 * 8;
            p.k[b][i] = load16(keys[i], dim * 2, dim < KEY_DIM);
        }
    p.seen[0] = keys[0] != nullptr, p.seen[1] = keys[1] != nullptr;
}

__device__ __forceinline__ void load_piece(KeyValues& p, const PieceRows& rows) {
    load_keys(p, rows);
    load_values(p.v, rows.value);
}

// The rows of the token itself where they are in shared memory; position -1: they are not.
struct OwnRows {
    const element_t *key, *value;
    int position;
};

__device__ __forceinline__ void add_own_key(KeyValues& p, const OwnRows& own, int first) {
    int lane = threadIdx.x & 31, slot = own.position - first;
    if (slot < 0 || slot >= PIECE) return;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (lane / 4 + 8 * i == slot) {
            p.seen[i] = true;
#pragma unroll
            for (int b = 0; b < K_BLOCKS; b++)
                if (b * 32 + lane % 4 * 8 < KEY_DIM) p.k[b][i] = *(const uint4*)(own.key + b * 32 + lane % 4 * 8);
        }
}

__device__ __forceinline__ void add_own_value(KeyValues& p, const OwnRows& own, int first) {
    int lane = threadIdx.x & 31, slot = own.position - first;
    if (slot < 0 || slot >= PIECE) return;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (lane % 4 * 2 + (i & 1) + (i >> 1) * 8 == slot) {
#pragma unroll
            for (int b = 0; b < V_BLOCKS; b++)
                if (b * 64 + lane / 4 * 8 < VALUE_DIM) p.v[b][i] = *(const uint4*)(own.value + b * 64 + lane / 4 * 8);
        }
}

// The rows of a piece, on their way to the second-level cache.
__device__ __forceinline__ void fetch_piece_ahead(const PieceRows& rows) {
    const char* row = threadIdx.x & 16 ? rows.value : rows.key;
    for (int at = 0; row && at < (threadIdx.x & 16 ? VALUE_DIM : KEY_DIM) * 2; at += 128) fetch_line_ahead(row + at);
}

// All pieces of a part of [from, to); keys before `begin` and from `known` on are not in memory. `rows`, `next`: of
// its first two pieces; the first one is in `now` where DEEP, and its keys are where `loaded`.
__device__ __forceinline__ void take_part(Running& r, const u32 (&q)[HEAD_TILES][K_BLOCKS][4], const KvView& kv, int seq, int head,
                                          int from, int to, int begin, int known, KeyValues& now, PieceRows rows, PieceRows next,
                                          const OwnRows& own, bool loaded, int part) {
    u32 p[HEAD_TILES][2];
    known = min(to, known);
#if DEEP
    KeyValues ahead;
    for (int first = from + part * PIECE; first < to; first += STEP) {
        if (first + STEP < to) load_piece(ahead, next);
        if (first + 2 * STEP < to) next = find_piece(kv, seq, head, first + 2 * STEP, begin, known);
        if (PREPARE) add_own_key(now, own, first), add_own_value(now, own, first);
        weigh(r, q, now.k, now.seen[0], now.seen[1], p);
        gather(r, p, now.v);
        now = ahead;
    }
#else
    for (int first = from + part * PIECE; first < to; first += STEP) {
        if (!EARLY_KEYS || !loaded) load_keys(now, rows);
        loaded = false;
        if (KEY_DIM <= 128) load_values(now.v, rows.value);
        const char* values = rows.value;
        if (first + STEP < to) rows = find_piece(kv, seq, head, first + STEP, begin, known);
        if (PREPARE) add_own_key(now, own, first);
        weigh(r, q, now.k, now.seen[0], now.seen[1], p);
        if (KEY_DIM > 128) load_values(now.v, values);
        if (PREPARE) add_own_value(now, own, first);
        gather(r, p, now.v);
    }
#endif
}

// A part of a split to shared memory: maxima, sums, vectors [SPLIT_PARTS][GROUP][VALUE_DIM].
__device__ __forceinline__ void leave_part(const Running& r, Shared& s, float* vectors, int part) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int t = 0; t < HEAD_TILES; t++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = r.sum[t][h];
#pragma unroll
            for (int offset = 4; offset < 32; offset <<= 1) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
            int head = t * 8 + lane % 4 * 2 + h;
            if (lane < 4) s.maximum[part][head] = r.maximum[t][h], s.sum[part][head] = sum;
#pragma unroll
            for (int i = 0; i < V_BLOCKS * 4; i++) {
                int dim = i / 4 * 64 + lane / 4 * 8 + i % 4 * 2;
                if (head < GROUP && dim < VALUE_DIM)
                    *(float2*)(vectors + (part * GROUP + head) * VALUE_DIM + dim) = make_float2(r.vector[t][i][h], r.vector[t][i][2 + h]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    paged_decode(const float* q,           // [T, n_head * q_stride]
                 const int* positions,     // [T]
                 const int* seq_of_token,  // [T]
                 const int* query_start,   // [S + 1]; used where by_sequence
                 const char* kv_base,       // pool base + layer offset
                 const int* pages,         // [S, n_blocks]
                 const float* sinks,       // [n_head] or null
                 float* partials,          // [tokens, n_head, MAX_SPLITS, VALUE_DIM + 2]; null where Z = 1
                 unsigned* arrivals,       // [tokens, gridDim.x], zero before and after
                 float* out,               // [T, n_head * VALUE_DIM]
                 ACT_PARAMETERS,           // quantised copy, where VALUE_DIM is a multiple of 32
                 long long page_bytes, int n_blocks, int page_tokens, int n_head, int n_head_kv, int q_stride, int window,
                 int gated, int by_sequence, float scale,
                 const float* k,       // [T, n_head_kv * KEY_DIM]; this and what follows where PREPARE
                 const float* v,       // [T, n_head_kv * VALUE_DIM]
                 const float* q_norm,  // [q_norm_dim] or null
                 const float* k_norm,  // [k_norm_dim] or null
                 const float* rope,    // [n_positions, n_rot] or null
                 int q_norm_dim, int k_norm_dim, int n_rot, int rope_first, float eps) {
    extern __shared__ __align__(16) char shared[];
    __shared__ __align__(16) Shared s;
    float* vectors = (float*)shared;
    int token = blockIdx.y, seq = blockIdx.y;
#if PREPARE
    // The batch and its page table were there before the step began.
    seq = load_early(seq_of_token + token);
    int position = load_early(positions + token);
#else
    follow_predecessor();
    if (by_sequence) {  // sequences that bring more than one token belong to the prefill kernel
        token = query_start[seq];
        if (query_start[seq + 1] - token != 1) return;
    } else {
        seq = seq_of_token[token];
    }
    int position = positions[token];
#endif
    int first_head = blockIdx.x * GROUP, kv_head = first_head / (n_head / n_head_kv);
    int end = position + 1, begin = window > 0 ? max(0, end - window) : 0, known = PREPARE ? position : end;
    int aligned = begin / 64 * 64, units = (end - aligned + UNIT - 1) / UNIT;
    int split_keys = (units + MAX_SPLITS - 1) / MAX_SPLITS * UNIT;
    int n_splits = units <= 0 ? 0 : (units * UNIT + split_keys - 1) / split_keys;
    int n_active = min(n_splits, (int)gridDim.z);
    if ((int)blockIdx.z >= max(n_active, 1)) return;
    bool alone = n_active <= 1;
    KvView kv{kv_base, page_bytes, pages, n_blocks, page_tokens, n_head_kv, KEY_DIM * 2, VALUE_DIM * 2};
    const float* queries = q + ((long long)token * n_head + first_head) * q_stride;
    float* part = partials + ((long long)blockIdx.y * n_head + first_head) * MAX_SPLITS * SPLIT_FLOATS;
    // The page table is asked first: its answer and the queries come together.
    int first_key = aligned + blockIdx.z * split_keys;
    int first_end = min(end, first_key + split_keys), first_piece = first_key + (threadIdx.x >> 5) * PIECE;
    PieceRows rows = find_piece(kv, seq, kv_head, first_piece, begin, min(first_end, known));
    PieceRows next = rows;
    if (DEEP || PREPARE) next = find_piece(kv, seq, kv_head, first_piece + STEP, begin, min(first_end, known));
    KeyValues now;
    u32 query_parts[HEAD_TILES][K_BLOCKS][4];
    OwnRows own{nullptr, nullptr, -1};
#if PREPARE
    __shared__ __align__(16) Prepared prepared;  // read by vectors
    long long kv_at = (long long)token * n_head_kv + kv_head;
    Raw raw = {queries, k + kv_at * KEY_DIM, v + kv_at * VALUE_DIM, q_norm != nullptr, k_norm != nullptr, rope != nullptr,
               q_norm_dim, k_norm_dim, n_rot, rope_first, eps};
    const char *key_row = nullptr, *value_row = nullptr;
    if (n_splits > 0 && (n_splits - 1) % (int)gridDim.z == (int)blockIdx.z)
        key_row = kv_rows<true>(kv, seq, kv_head, position, value_row);
    if (DEEP) {
        if (first_piece < first_end) load_piece(now, rows);
    } else {
        fetch_piece_ahead(rows), fetch_piece_ahead(next);
        if (EARLY_KEYS && first_piece < first_end) load_keys(now, rows);
    }
    if (n_splits > 0) prepare_ahead(prepared, raw, q_norm, k_norm, rope + (long long)position * n_rot);
    __syncthreads();
    follow_predecessor();
    if (n_splits > 0) {
        prepare(prepared, raw, q_stride, (char*)key_row, (char*)value_row);
        load_queries(query_parts, prepared.heads[0], HEAD_DIM, scale * LOG2E);
    }
    if (key_row) own = OwnRows{prepared.key, prepared.value, position};
#else
    if (n_splits > 0) load_queries(query_parts, queries, q_stride, scale * LOG2E);
    if (DEEP && first_piece < first_end) load_piece(now, rows);
#endif
    Folded folded[PAIRS_EACH];
#pragma unroll
    for (int i = 0; i < PAIRS_EACH; i++) folded[i] = Folded{NEGATIVE_INFINITY, 0.0f, make_float2(0.0f, 0.0f)};

    for (int split = blockIdx.z; split < n_splits; split += gridDim.z) {
        int from = aligned + split * split_keys, to = min(end, from + split_keys);
        Running r;
#if PARTS > 1
#pragma unroll 1
        for (int my_part = threadIdx.x >> 5; my_part < SPLIT_PARTS; my_part += WARPS)
#else
        const int my_part = threadIdx.x >> 5;
#endif
        {
#pragma unroll
            for (int t = 0; t < HEAD_TILES; t++) {
                r.maximum[t][0] = r.maximum[t][1] = NEGATIVE_INFINITY, r.sum[t][0] = r.sum[t][1] = 0.0f;
#pragma unroll
                for (int i = 0; i < V_BLOCKS * 4; i++)
                    r.vector[t][i][0] = r.vector[t][i][1] = r.vector[t][i][2] = r.vector[t][i][3] = 0.0f;
            }
            bool follows = PARTS > 1 && my_part >= WARPS;  // of this split, on a part of the same warp
            if (split != (int)blockIdx.z || follows) {
                int piece = from + my_part * PIECE;
                rows = find_piece(kv, seq, kv_head, piece, begin, min(to, known));
                if (DEEP) next = find_piece(kv, seq, kv_head, piece + STEP, begin, min(to, known));
                if (DEEP && piece < to) load_piece(now, rows);
            }
            take_part(r, query_parts, kv, seq, kv_head, from, to, begin, known, now, rows, next, own,
                      split == (int)blockIdx.z && !follows, my_part);
            leave_part(r, s, vectors, my_part);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PAIRS_EACH; i++) {
            int at = threadIdx.x + i * THREADS, head = at / PAIRS, pair = at % PAIRS;
            if (at >= GROUP * PAIRS) break;
            Folded f{NEGATIVE_INFINITY, 0.0f, make_float2(0.0f, 0.0f)};
#pragma unroll
            for (int w = 0; w < SPLIT_PARTS; w++)
                fold(f, s.maximum[w][head], s.sum[w][head], *(const float2*)(vectors + (w * GROUP + head) * VALUE_DIM + 2 * pair));
            if (alone) {
                fold(folded[i], f.maximum, f.sum, f.vector);
            } else {
                float* p = part + (head * MAX_SPLITS + split) * SPLIT_FLOATS;
                *(float2*)(p + 2 + 2 * pair) = f.vector;
                if (pair == 0) *(float2*)p = make_float2(f.maximum, f.sum);
            }
        }
        __syncthreads();
    }
    int width = n_head * VALUE_DIM, first = first_head * VALUE_DIM;
    if (!alone) {
        if (!arrives_last(arrivals + blockIdx.y * gridDim.x + blockIdx.x, n_active, &s.is_last)) return;
    }
#pragma unroll
    for (int i = 0; i < PAIRS_EACH; i++) {
        int at = threadIdx.x + i * THREADS, head = at / PAIRS, pair = at % PAIRS;
        if (at >= GROUP * PAIRS) break;
        if (!alone) fold_all(folded[i], part + head * MAX_SPLITS * SPLIT_FLOATS, n_splits, SPLIT_FLOATS, pair);
        const float* gate = gated ? queries + head * q_stride + KEY_DIM + 2 * pair : nullptr;
        float2 o = finish_pair(folded[i], sinks ? sinks + first_head + head : nullptr, gate);
        *(float2*)(out + (long long)token * width + first + 2 * at) = o;
        *(float2*)(vectors + 2 * at) = o;
    }
    if (!act_values) return;
    __syncthreads();
    for (int c = threadIdx.x; c < GROUP * VALUE_DIM; c += THREADS)
        store_act_block(ACT_ARGUMENTS, token, width, (first + c) / ACT_BLOCK, vectors[c]);
}
