// Rows of a packed matrix as float32: the token embedding.
//
//   out[t] = scale * W[ids[t]]
//
// grid (T, pieces / THREADS); a thread unpacks one piece of 32 weights. A negative id (padding) gives zeros.
// -D  FORMAT: a struct of quants/. Bytes moved: T packed rows in, T float32 rows out.

#include "common/follow.cuh"
#include "quants/all.cuh"

template <class F>
__device__ __forceinline__ void write_piece(const u8* row, int piece, float scale, float* to) {
    typename F::Raw raw;
    F::load(row, piece, raw);
    if constexpr (F::IS_FLOAT) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float2 v = F::pair(raw, i);
            *(float2*)(to + piece * 32 + 2 * i) = make_float2(v.x * scale, v.y * scale);
        }
    } else {
        Piece w;
        F::unpack(raw, piece, w);
#pragma unroll
        for (int g = 0; g < 2; g++) {
            float4* at = (float4*)(to + F::group(piece, g));
            float offset = F::OFFSET ? w.offset[g] : 0.0f, factor = w.scale[g];
            auto value = [&](int e) {
                float q = (float)(i8)((w.q[4 * g + e / 4] >> (8 * (e % 4))) & 0xffu);
                return fmaf(factor, q, offset) * F::POST * scale;
            };
#pragma unroll
            for (int i = 0; i < 4; i++) at[i] = make_float4(value(4 * i), value(4 * i + 1), value(4 * i + 2), value(4 * i + 3));
        }
    }
}

extern "C" __global__ void embed(const u8* table,  // [n_vocab, row_bytes]
                                 const int* ids,   // [T]
                                 float* out,       // [T, width]
                                 int n_vocab, int width, i64 row_bytes, float scale) {
    follow_predecessor();
    int piece = blockIdx.y * blockDim.x + threadIdx.x;
    if (piece * 32 >= width) return;
    int id = ids[blockIdx.x];
    float* to = out + (i64)blockIdx.x * width;
    if (id < 0 || id >= n_vocab) {
        for (int g = 0; g < 2; g++)
            for (int i = 0; i < 16; i++) to[FORMAT::group(piece, g) + i] = 0.0f;
        return;
    }
    write_piece<FORMAT>(table + id * row_bytes, piece, scale, to);
}
