// What every row of logits goes through before a token is taken.
//
// penalise   logits in place: bias; repetition (l > 0: l / p, else l p); minus frequency * count + presence (grid: rows)
// argmax     the largest logit of each row, lowest id on ties (grid: parts, rows; the last part of a row folds)
//
// Bytes moved: argmax reads the logits once.

#include "common/arrive.cuh"
#include "common/follow.cuh"
#include "sampling/keys.cuh"

extern "C" __global__ void penalise(float* logits,           // [R, n_vocab]
                                    const int* list_start,   // [3, R + 1]: of bias, history, output lists
                                    const int* ids,          // [all lists]
                                    const float* values,     // [all lists]: bias, unused, count
                                    const float* penalties,  // [R, 3]: repetition, frequency, presence
                                    int n_rows, int n_vocab) {
    follow_predecessor();
    int row = blockIdx.x;
    float* l = logits + (long long)row * n_vocab;
    const float* p = penalties + row * 3;
    for (int list = 0; list < 3; list++) {
        const int* start = list_start + list * (n_rows + 1) + row;
        for (int i = start[0] + threadIdx.x; i < start[1]; i += blockDim.x) {
            float v = l[ids[i]];
            if (list == 0) v += values[i];
            else if (list == 1) v = v > 0.0f ? v / p[0] : v * p[0];
            else v -= p[1] * values[i] + (values[i] > 0.0f ? p[2] : 0.0f);
            l[ids[i]] = v;
        }
        __syncthreads();
    }
}

__device__ __forceinline__ u64 block_max(u64 v, u64* partial) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) v = max(v, __shfl_xor_sync(FULL_WARP, v, offset));
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = v;
    __syncthreads();
    for (int i = 0; i < (int)blockDim.x / 32; i++) v = max(v, partial[i]);
    __syncthreads();
    return v;
}

extern "C" __global__ void argmax(const float* logits,  // [R, n_vocab]
                                  u64* best,            // [R, parts]
                                  unsigned* arrivals,   // [R], zero before and after
                                  int* out_ids,         // [R]
                                  int n_vocab) {
    follow_predecessor();
    __shared__ __align__(16) u64 partial[32];
    __shared__ int is_last;
    int row = blockIdx.y, parts = gridDim.x;
    const float* l = logits + (long long)row * n_vocab;
    u64 top = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n_vocab; i += parts * blockDim.x) top = max(top, rank_of(l[i], i));
    top = block_max(top, partial);
    if (threadIdx.x == 0) best[row * parts + blockIdx.x] = top;
    if (!arrives_last(arrivals + row, parts, &is_last)) return;
    top = 0;
    for (int i = threadIdx.x; i < parts; i += blockDim.x) top = max(top, __ldcg(best + row * parts + i));
    top = block_max(top, partial);
    if (threadIdx.x == 0) {
        out_ids[row] = (int)~(unsigned)top;
        best[row * parts] = top;  // the draw starts from it
    }
}
