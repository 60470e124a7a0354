// A piece of a packed weight row: 32 weights as two groups of 16, decoded to bytes; and its product with 8-bit
// activations. Every format of quants/ unpacks to this one form, so kernels know no format.
//
//   weight[g][e] = (scale[g] * q[g][e] + offset[g]) * Format::POST
//
// The members of a format, in the order of its header:
//   BLOCK, BYTES     elements and bytes of a stored block
//   IS_FLOAT         plain numbers; then load8 and pair in place of unpack
//   OFFSET           offset[] is used
//   ONE_BLOCK        both groups lie in one activation block and have one scale and offset
//   PAIRED           pieces 2 i and 2 i + 1 have equal scales and offsets, and group g of both lies in one activation
//                    block; then load_second brings the odd one
//   ORDER            formats of equal order have equal group(): 0 = pieces of 32 neighbours
//   POST             power of two that keeps scale[] in float32's normal range
//   Raw, load        the stored bytes of a piece in registers
//   group            first element of group g of a piece, a multiple of 16, from the row's start
//   unpack           Raw -> Piece
#pragma once

#include "common/types.cuh"

struct Piece {
    u32 q[8];  // group 0 in words 0..3, group 1 in words 4..7; element e of a group is byte e % 4 of word e / 4
    float scale[2];
    float offset[2];
};

// The activations of one token that meet a piece.
struct ActPiece {
    u32 q[8];
    float scale[2];
    float sum[2];
    int total[2];  // the sums as integers
};

template <class F, bool TOTALS = false>
__device__ __forceinline__ void load_act(const i8* values, const float* scales, const int* sums, int piece, ActPiece& x) {
#pragma unroll
    for (int g = 0; g < 2; g++) {
        int first = F::group(piece, g);
        uint4 v = *(const uint4*)(values + first);
        x.q[4 * g] = v.x, x.q[4 * g + 1] = v.y, x.q[4 * g + 2] = v.z, x.q[4 * g + 3] = v.w;
        if (F::ONE_BLOCK && g == 1) {
            x.scale[1] = x.scale[0];
        } else {
            x.scale[g] = scales[first / ACT_BLOCK];
        }
        if (F::OFFSET || TOTALS) {
            int both = sums[first / ACT_BLOCK];
            x.total[g] = (first & 16) ? both >> 16 : (int)(short)both;
            x.sum[g] = (float)x.total[g];
        }
    }
}

// acc + weights . activations, without POST. The order of the float operations is part of the contract: results of the
// integer path are equal for every batch size. BIAS: all q are that much too large.
template <class F, int BIAS = 0>
__device__ __forceinline__ float dot(const Piece& w, const ActPiece& x, float acc) {
    int a = 0, b = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a = __dp4a((int)w.q[i], (int)x.q[i], a);
        b = __dp4a((int)w.q[4 + i], (int)x.q[4 + i], b);
    }
    if (BIAS) a -= BIAS * x.total[0], b -= BIAS * x.total[1];
    if (F::ONE_BLOCK) {
        float r = w.scale[0] * (float)(a + b);
        if (F::OFFSET) r = fmaf(w.offset[0], x.sum[0] + x.sum[1], r);
        return fmaf(x.scale[0], r, acc);
    }
    float r0 = w.scale[0] * (float)a, r1 = w.scale[1] * (float)b;
    if (F::OFFSET) {
        r0 = fmaf(w.offset[0], x.sum[0], r0);
        r1 = fmaf(w.offset[1], x.sum[1], r1);
    }
    return fmaf(x.scale[1], r1, fmaf(x.scale[0], r0, acc));
}

// The same for the two pieces of a pair, whose groups are added before they are scaled.
template <class F>
__device__ __forceinline__ float dot_pair(const Piece& w, const Piece& w2, const ActPiece& x, const ActPiece& x2, float acc) {
    int a = 0, b = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a = __dp4a((int)w2.q[i], (int)x2.q[i], __dp4a((int)w.q[i], (int)x.q[i], a));
        b = __dp4a((int)w2.q[4 + i], (int)x2.q[4 + i], __dp4a((int)w.q[4 + i], (int)x.q[4 + i], b));
    }
    float r0 = w.scale[0] * (float)a, r1 = w.scale[1] * (float)b;
    if (F::OFFSET) {
        r0 = fmaf(w.offset[0], x.sum[0] + x2.sum[0], r0);
        r1 = fmaf(w.offset[1], x.sum[1] + x2.sum[1], r1);
    }
    return fmaf(x.scale[1], r1, fmaf(x.scale[0], r0, acc));
}

// How the integer kernels take a row: by spans of PIECES pieces, which a lane loads and unpacks together. A
// format may have its own way, with the same members (quants/q6_k.cuh).
template <class F>
struct Dots {
    static constexpr int PIECES = F::PAIRED ? 2 : 1, BIAS = 0;
    struct Raw {
        typename F::Raw part[PIECES];
    };
    static __device__ __forceinline__ int piece(int span, int i) { return span * PIECES + i; }

    static __device__ __forceinline__ void load(const u8* row, int span, Raw& r) {
        F::load(row, span * PIECES, r.part[0]);
        if constexpr (F::PAIRED) F::load_second(row, span * 2 + 1, r.part[0], r.part[1]);
    }

    static __device__ __forceinline__ void unpack(const Raw& r, int span, Piece (&w)[PIECES]) {
#pragma unroll
        for (int i = 0; i < PIECES; i++) F::unpack(r.part[i], piece(span, i), w[i]);
    }
};

// Element e (0..31: group 0, then group 1) of a piece as float32.
template <class F>
__device__ __forceinline__ float piece_value(const Piece& w, int e) {
    int g = e >> 4;
    float q = (float)(i8)(w.q[e >> 2] >> (8 * (e & 3)));
    float v = w.scale[g] * q;
    if (F::OFFSET) v += w.offset[g];
    return v * F::POST;
}
