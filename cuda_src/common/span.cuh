// A span: 64 weights of a packed row as four groups of 16 halves. The spans of four neighbouring lanes are 256 elements,
// a step of the strip kernels.
//
//   weight[i][e] = scale * half[i][e] - min_scale * minimum[i]      (SCALED; MINS: with the second term)
//   weight[i][e] = half[i][e]                                       (otherwise)
//
// Scale and min_scale are those of the row's 256 elements: they multiply sums of products once a step, so that decoding a
// weight takes one multiply-add on two halves. Types without such a form use two pieces (this file); the others have theirs
// in quants/spans.cuh, with the same members:
//
//   load(row, span, n_pieces)   the stored bytes into registers; a row has n_pieces pieces of 32
//   first(span, i)              first element of group i, from the row's start; beyond the row's end = zeros
//   Halves(bytes, span, n_pieces, magic)  group(i, out), minimum(i) as two equal halves, scale, min_scale
//   MAGIC                       what the constructor gets as magic, by way of a register
#pragma once

#include "common/mma.cuh"

// x, from a width that 32 divides, by a way that the compiler cannot see through: an operation on two constants has room for
// one of them, and short of registers it sets the other anew before every use.
__device__ __forceinline__ u32 kept_in_register(u32 x, int width) { return x | ((u32)width & 31u); }

template <class F>
struct Span {
    static constexpr bool SCALED = false, MINS = false;
    static constexpr u32 MAGIC = 0;
    typename F::Raw raw[2];

    __device__ __forceinline__ void load(const u8* row, int span, int n_pieces) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (F::BLOCK == 256 || 2 * span + i < n_pieces) F::load(row, 2 * span + i, raw[i]);
        }
    }

    static __device__ __forceinline__ int first(int span, int i) { return F::group(2 * span + (i >> 1), i & 1); }

    struct Halves {
        const Span& bytes;
        int span, n_pieces;
        float scale, min_scale;

        __device__ __forceinline__ Halves(const Span& stored, int place, int pieces, u32)
            : bytes(stored), span(place), n_pieces(pieces), scale(1.0f), min_scale(0.0f) {}

        __device__ __forceinline__ void group(int i, u32 (&out)[8]) const {
            int piece = 2 * span + (i >> 1);
            if (F::BLOCK == 256 || piece < n_pieces) {
                typename SourceOf<F>::type source(bytes.raw[i >> 1], piece);
                source.group(i & 1, out);
            } else {
#pragma unroll
                for (int e = 0; e < 8; e++) out[e] = 0u;
            }
        }
        __device__ __forceinline__ u32 minimum(int) const { return 0u; }
    };
};
