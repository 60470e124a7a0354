// The packed rows of a block asked for before the kernel waits for its input.
#pragma once

#include "common/follow.cuh"
#include "matmul/matrices.cuh"
#include "quants/all.cuh"

// Blocks of the x axis whose weights are asked for ahead: about as many as a large card holds at once.
#define AHEAD_BLOCKS 400

// Bytes of a row of a matrix of that kind.
__device__ __forceinline__ i64 packed_row_bytes(int kind, int width) {
#ifdef FORMAT_C
    if (kind == 2) return (i64)(width / FORMAT_C::BLOCK) * FORMAT_C::BYTES;
#endif
#ifdef FORMAT_B
    if (kind == 1) return (i64)(width / FORMAT_B::BLOCK) * FORMAT_B::BYTES;
#endif
    return (i64)(width / FORMAT_A::BLOCK) * FORMAT_A::BYTES;
}

// The block's block_rows rows of its matrix, on their way to the second-level cache.
__device__ __forceinline__ void fetch_rows_ahead(const Matrix& m, int block_rows, int width) {
    if (blockIdx.x >= AHEAD_BLOCKS || blockIdx.y) return;
    int first = ((int)blockIdx.x - m.first) * block_rows;
    i64 row_bytes = packed_row_bytes(m.kind, width);
    fetch_ahead(m.weight + first * row_bytes, min(block_rows, m.n_out - first) * row_bytes);
}
