// Products of packed weight rows with a few tokens, by integer dot products (plain formats: by float32).
//
//   acc[r][t] = sum over the lane's pieces of rows[r] . activation of tokens[t]
//
// L neighbouring lanes share a row; lane l takes spans (one piece or two: Dots) l, l + L, ... A lane works on R rows and T
// tokens at once. The order of a row's sums depends on L and on nothing else, not on R or T: results are equal for every
// batch size.
#pragma once

#include "common/dot.cuh"
#include "common/warp.cuh"
#include "quants/all.cuh"

// Words of packed weights that a lane holds in flight: more hides more latency, and costs registers and so warps.
#ifndef STAGE_WORDS
#define STAGE_WORDS 32
#endif

// Most words that a lane asks for before it is ready() for them: they take registers from what is done until then.
#ifndef EARLY_WORDS
#define EARLY_WORDS 64
#endif

// Threads that a multiprocessor must be able to hold, which bounds a thread's registers: loads in flight hide the latency
// of memory, and more warps have more of them.
#ifndef RESIDENT_THREADS
#define RESIDENT_THREADS (TOKEN_TILE > 2 ? 512 : 768)
#endif

// What a product calls between asking for the first weights and reading activations.
struct Nothing {
    __device__ __forceinline__ void operator()() const {}
};

template <class F, int L, int R, int T, class Ready>
__device__ __forceinline__ void integer_dots(const u8* const (&rows)[R], const ActView& x, const int (&tokens)[T],
                                             int n_tokens, int lane, Ready ready, float (&acc)[R][T]) {
    typedef Dots<F> Form;
    constexpr int SPAN = Form::PIECES;
    constexpr int WORDS = R * (int)(sizeof(typename Form::Raw) / 4);
    constexpr int DEPTH = STAGE_WORDS / WORDS < 1 ? 1 : STAGE_WORDS / WORDS > 4 ? 4 : STAGE_WORDS / WORDS;
    int n_spans = x.width / (32 * SPAN), n_blocks = x.width / ACT_BLOCK;
    typename Form::Raw raw[DEPTH][R];
    auto load_stage = [&](int first) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            int span = first + d * L;
            if (span < n_spans) {
#pragma unroll
                for (int r = 0; r < R; r++) Form::load(rows[r], span, raw[d][r]);
            }
        }
    };
    constexpr bool EARLY = !IsSame<Ready, Nothing>::value && WORDS <= EARLY_WORDS;
    if constexpr (EARLY) load_stage(lane);
    ready();
    for (int first = lane; first < n_spans; first += L * DEPTH) {
        if constexpr (!EARLY) load_stage(first);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            int span = first + d * L;
            if (span < n_spans) {
                Piece w[R][SPAN];
#pragma unroll
                for (int r = 0; r < R; r++) Form::unpack(raw[d][r], span, w[r]);
#pragma unroll
                for (int t = 0; t < T; t++) {
                    if (T == 1 || t < n_tokens) {
                        ActPiece a[SPAN];
                        i64 token = tokens[t];
#pragma unroll
                        for (int i = 0; i < SPAN; i++)
                            load_act<F, Form::BIAS != 0>(x.values + token * x.width, x.scales + token * n_blocks,
                                                         x.sums + token * n_blocks, Form::piece(span, i), a[i]);
#pragma unroll
                        for (int r = 0; r < R; r++) {
                            if constexpr (F::PAIRED) {
                                acc[r][t] = dot_pair<F>(w[r][0], w[r][1], a[0], a[1], acc[r][t]);
                            } else {
#pragma unroll
                                for (int i = 0; i < SPAN; i++) acc[r][t] = dot<F, Form::BIAS>(w[r][i], a[i], acc[r][t]);
                            }
                        }
                    }
                }
            }
        }
        if constexpr (EARLY) load_stage(first + L * DEPTH);
    }
}

// Eight elements of the rows, w[r], from chunk c on, times those of the tokens.
template <int R, int T>
__device__ __forceinline__ void add_chunk(const float (&w)[R][8], const ActView& x, const int (&tokens)[T], int n_tokens, int c,
                                          float (&acc)[R][T]) {
#pragma unroll
    for (int t = 0; t < T; t++) {
        if (T == 1 || t < n_tokens) {
            const float4* at = (const float4*)(x.f32 + (i64)tokens[t] * x.width) + 2 * c;
            float4 a = at[0], b = at[1];
            float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int r = 0; r < R; r++) {
#pragma unroll
                for (int i = 0; i < 8; i++) acc[r][t] = fmaf(w[r][i], v[i], acc[r][t]);
            }
        }
    }
}

template <class F, int L, int R, int T, class Ready>
__device__ __forceinline__ void float_dots(const u8* const (&rows)[R], const ActView& x, const int (&tokens)[T],
                                           int n_tokens, int lane, Ready ready, float (&acc)[R][T]) {
    constexpr int DEPTH = R * T == 1 ? 8 : 2;  // routers of one token: all of a row's loads in flight
    constexpr bool EARLY = !IsSame<Ready, Nothing>::value && R == 1;
    int n_chunks = x.width / 8, begin = lane;
    if constexpr (EARLY) {
        float w[8][1][8];
#pragma unroll
        for (int d = 0; d < 8; d++)
            if (lane + d * L < n_chunks) F::load8(rows[0] + (i64)(lane + d * L) * 8 * F::BYTES, w[d][0]);
        ready();
#pragma unroll
        for (int d = 0; d < 8; d++)
            if (lane + d * L < n_chunks) add_chunk<1, T>(w[d], x, tokens, n_tokens, lane + d * L, acc);
        begin = lane + 8 * L;
    } else {
        ready();
    }
#pragma unroll DEPTH
    for (int c = begin; c < n_chunks; c += L) {
        float w[R][8];
#pragma unroll
        for (int r = 0; r < R; r++) F::load8(rows[r] + (i64)c * 8 * F::BYTES, w[r]);
        add_chunk<R, T>(w, x, tokens, n_tokens, c, acc);
    }
}

// acc[r][t] becomes the whole product in all L lanes of a row. ready(): the activations may be read from then on.
template <class F, int L, int R, int T, class Ready = Nothing>
__device__ __forceinline__ void row_dots(const u8* const (&rows)[R], const ActView& x, const int (&tokens)[T],
                                         int n_tokens, int lane, float (&acc)[R][T], Ready ready = {}) {
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int t = 0; t < T; t++) acc[r][t] = 0.0f;
    }
    if constexpr (F::IS_FLOAT) {
        float_dots<F, L, R, T>(rows, x, tokens, n_tokens, lane, ready, acc);
    } else {
        integer_dots<F, L, R, T>(rows, x, tokens, n_tokens, lane, ready, acc);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int t = 0; t < T; t++) acc[r][t] = group_sum<L>(acc[r][t]) * F::POST;
    }
}
