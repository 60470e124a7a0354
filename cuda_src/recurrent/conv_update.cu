// Causal depthwise convolution with a carried state of the last K - 1 inputs, oldest first.
//
//   out[t, c] = sum_i w[c, i] u[t - (K - 1) + i, c] + bias[c], then silu where asked
//
// conv_step    every sequence brings one token: reads and writes its state rows (grid: channels, sequences)
// conv_tokens  any tokens, all at once; the first K - 1 of a sequence also read the state (grid: channels, TOKENS tokens)
// conv_state   after conv_tokens: the new state (grid: channels, sequences)
//
// State rows of a sequence are K - 1 consecutive pages of the pool, one float32 row of C channels each.
// -D  TAPS = K (2 to 8). Bytes moved: inputs and outputs once, K - 1 state rows in and out.

#include "common/follow.cuh"
#include "common/math.cuh"
#include "common/paged.cuh"
#include "common/types.cuh"

#define CARRIED (TAPS - 1)
#define TOKENS 8  // of a thread in conv_tokens, which keeps the taps in registers from one to the next

// A channel's weights, in registers from one token to the next.
struct Taps {
    float weight[TAPS], bias;

    __device__ __forceinline__ Taps(const float* weights, const float* biases, int c) {
#pragma unroll
        for (int i = 0; i < TAPS; i++) weight[i] = load_constant(weights + (long long)c * TAPS + i);
        bias = biases ? load_constant(biases + c) : 0.0f;
    }

    __device__ __forceinline__ float convolve(const float (&x)[TAPS], bool silu_after) const {
        float sum = bias;
#pragma unroll
        for (int i = 0; i < TAPS; i++) sum = fmaf(weight[i], x[i], sum);
        return silu_after ? silu(sum) : sum;
    }
};

#define CONV_PARAMETERS                                                                                                  \
    const float *u,          /* [T, C] */                                                                                \
        const float *weight, /* [C, K] */                                                                                \
        const float *bias,   /* [C] or null */                                                                           \
        float *out,          /* [T, C] */                                                                                \
        char *pool, const int *pages, /* [S, columns]: first page of the rows */                                         \
        const bool *fresh,            /* [S] */                                                                          \
        const int *query_start,       /* [S + 1] */                                                                      \
        const int *seq_of_token,      /* [T] */                                                                          \
        long long page_bytes, int columns, int column, int channels, int silu_after

extern "C" __global__ void conv_step(CONV_PARAMETERS) {
    // Batch and state were there before the step began.
    int c = blockIdx.x * blockDim.x + threadIdx.x, seq = blockIdx.y;
    long long token = load_early(query_start + seq);
    char* state = (char*)state_page<true>(pool, page_bytes, pages, columns, seq, column);
    if (!state || c >= channels) {
        follow_predecessor();
        return;
    }
    float x[TAPS];
    bool zero = load_early(fresh + seq);
#pragma unroll
    for (int i = 0; i < CARRIED; i++)
        x[i] = zero ? 0.0f : __int_as_float(load_early((const int*)(state + i * page_bytes) + c));
    fetch_line_ahead(weight + (long long)c * TAPS);
    follow_predecessor();
    x[CARRIED] = u[token * channels + c];
    out[token * channels + c] = Taps(weight, bias, c).convolve(x, silu_after);
#pragma unroll
    for (int i = 0; i < CARRIED; i++) ((float*)(state + i * page_bytes))[c] = x[i + 1];
}

extern "C" __global__ void conv_tokens(CONV_PARAMETERS, int n_tokens) {
    follow_predecessor();
    int c = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * TOKENS;
    if (c >= channels) return;
    // All asked for before the first store, after which the compiler may not move loads.
    Taps taps(weight, bias, c);
    float x[TAPS], in[TOKENS];
    int seqs[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        in[i] = first + i < n_tokens ? u[(long long)(first + i) * channels + c] : 0.0f;
        seqs[i] = first + i < n_tokens ? seq_of_token[first + i] : -1;
    }
    int seq = -1, start = 0;
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        int token = first + t;
        if (token >= n_tokens) break;
        if (seqs[t] != seq) {  // the inputs before this token, of the step or of the state
            seq = seqs[t];
            start = query_start[seq];
            const char* state = (const char*)state_page(pool, page_bytes, pages, columns, seq, column);
            bool zero = fresh[seq] || !state;
#pragma unroll
            for (int i = 0; i < CARRIED; i++) {
                int source = token - CARRIED + i;
                if (source >= start) x[i + 1] = u[(long long)source * channels + c];
                else x[i + 1] = zero ? 0.0f : ((const float*)(state + (source - start + CARRIED) * page_bytes))[c];
            }
        }
#pragma unroll
        for (int i = 0; i < CARRIED; i++) x[i] = x[i + 1];
        x[CARRIED] = in[t];
        out[(long long)token * channels + c] = taps.convolve(x, silu_after);
    }
}

extern "C" __global__ void conv_state(CONV_PARAMETERS) {
    follow_predecessor();
    int c = blockIdx.x * blockDim.x + threadIdx.x, seq = blockIdx.y;
    if (c >= channels) return;
    int start = query_start[seq], n = query_start[seq + 1] - start;
    char* state = (char*)state_page(pool, page_bytes, pages, columns, seq, column);
    if (!state || n <= 0) return;
    float rows[CARRIED > 0 ? CARRIED : 1];
    bool zero = fresh[seq];
#pragma unroll
    for (int i = 0; i < CARRIED; i++) {
        int source = n - CARRIED + i;  // of this step's inputs; negative: an old state row
        if (source >= 0) {
            rows[i] = u[(long long)(start + source) * channels + c];
        } else {
            rows[i] = zero ? 0.0f : ((float*)(state + (source + CARRIED) * page_bytes))[c];
        }
    }
#pragma unroll
    for (int i = 0; i < CARRIED; i++) ((float*)(state + i * page_bytes))[c] = rows[i];
}
