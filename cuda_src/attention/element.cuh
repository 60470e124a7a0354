// The stored number type of the KV cache: -DELEMENT 0 f16, 1 bf16, 2 f32.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if ELEMENT == 0
typedef __half element_t;
typedef __half2 element2_t;
#elif ELEMENT == 1
typedef __nv_bfloat16 element_t;
typedef __nv_bfloat162 element2_t;
#else
typedef float element_t;
typedef float2 element2_t;
#endif
#define ELEMENT_BYTES (ELEMENT == 2 ? 4 : 2)

__device__ __forceinline__ void store_element(char* row, int i, float v) {
#if ELEMENT == 0
    ((__half*)row)[i] = __float2half_rn(fminf(fmaxf(v, -65504.0f), 65504.0f));
#elif ELEMENT == 1
    ((__nv_bfloat16*)row)[i] = __float2bfloat16_rn(v);
#else
    ((float*)row)[i] = v;
#endif
}

// Two neighbouring elements as float32.
__device__ __forceinline__ float2 load_pair(const void* at) {
#if ELEMENT == 0
    return __half22float2(*(const __half2*)at);
#elif ELEMENT == 1
    return __bfloat1622float2(*(const __nv_bfloat162*)at);
#else
    return *(const float2*)at;
#endif
}
