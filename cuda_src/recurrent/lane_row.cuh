// A row of a recurrent state shared by LANES neighbouring lanes, EACH values in each.
#pragma once
#include "common/follow.cuh"
#include "recurrent/copy_floats.cuh"

#define LANES 8

// Which value of a row a lane's i-th is: float4 groups where the width allows, so that shared loads are 16 bytes wide.
template <int EACH>
__device__ __forceinline__ int element_of(int lane, int i) {
    return EACH % 4 == 0 ? (i / 4) * (4 * LANES) + lane * 4 + i % 4 : i * LANES + lane;
}

template <int EACH>
__device__ __forceinline__ void load_row(float (&to)[EACH], const float* from, int lane) {
    if (EACH % 4 == 0) {
#pragma unroll
        for (int i = 0; i < EACH / 4; i++) {
            float4 w = *(const float4*)(from + i * 4 * LANES + lane * 4);
            to[4 * i] = w.x, to[4 * i + 1] = w.y, to[4 * i + 2] = w.z, to[4 * i + 3] = w.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) to[i] = from[element_of<EACH>(lane, i)];
    }
}

// The same of global memory before follow_predecessor(): a state that an earlier step left.
template <int EACH>
__device__ __forceinline__ void load_row_early(float (&to)[EACH], const float* from, int lane) {
    if (EACH % 4 == 0) {
#pragma unroll
        for (int i = 0; i < EACH / 4; i++) {
            int4 w = load_early((const int4*)(from + i * 4 * LANES + lane * 4));
            to[4 * i] = __int_as_float(w.x), to[4 * i + 1] = __int_as_float(w.y);
            to[4 * i + 2] = __int_as_float(w.z), to[4 * i + 3] = __int_as_float(w.w);
        }
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) to[i] = __int_as_float(load_early((const int*)from + element_of<EACH>(lane, i)));
    }
}

