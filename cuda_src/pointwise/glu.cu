// Elementwise products that feed a matrix, the shared expert's gate, copies of rows, and the last touch on logits.
//
//   glu         out = act(gate) * up, or act(up) where gate is null
//   multiply    out = a * b
//   row_gate    out[t] = sigmoid(weight . x[t])
//   gather_rows out[i] = x[rows[i]]
//   take_tokens ids[t] = previous[-1 - ids[t]] where ids[t] < 0: tokens that the host has not seen yet
//   finish_logits  l *= scale; l = cap * tanh(l / cap) where cap > 0

#include "common/follow.cuh"
#include "common/math.cuh"
#include "common/warp.cuh"
#include "common/act_store.cuh"

// grid (T, parts of the row), a block handles COLUMNS columns
extern "C" __global__ void glu_rows(const float* gate,  // [T, width] or null
                                    const float* up,    // [T, width]
                                    float* out,         // [T, width]
                                    ACT_PARAMETERS,                  // quantised copy
                                    int width, int columns, int activation) {
    follow_predecessor();
    long long row = blockIdx.x;
    int first = blockIdx.y * columns, part = min(columns, width - first);
    const float* u = up + row * width + first;
    const float* g = gate ? gate + row * width + first : nullptr;
    store_row(out + row * width, ACT_ARGUMENTS, row, width, first, part,
              [&](int c) { return g ? glu(activation, g[c], u[c]) : activate(activation, u[c]); });
}

extern "C" __global__ void multiply_rows(const float* a,  // [T, width]
                                         const float* b,  // [T, width]
                                         float* out,      // [T, width]
                                         ACT_PARAMETERS,               // quantised copy
                                         int width, int columns) {
    follow_predecessor();
    long long row = blockIdx.x;
    int first = blockIdx.y * columns, part = min(columns, width - first);
    const float *x = a + row * width + first, *y = b + row * width + first;
    store_row(out + row * width, ACT_ARGUMENTS, row, width, first, part, [&](int c) { return x[c] * y[c]; });
}

// one block a row
extern "C" __global__ void row_gate(const float* x,       // [T, width]
                                    const float* weight,  // [width]
                                    float* out,           // [T]
                                    int width) {
    follow_predecessor();
    __shared__ __align__(16) float partial[32];
    const float* in = x + (long long)blockIdx.x * width;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) sum = fmaf(in[c], weight[c], sum);
    sum = block_sum(sum, partial);
    if (threadIdx.x == 0) out[blockIdx.x] = sigmoid(sum);
}

// one block a row; a negative row index (padding of a captured batch) copies nothing
extern "C" __global__ void gather_rows(const float* x,   // [T, width]
                                       const int* rows,  // [R]
                                       float* out,       // [R, width]
                                       int width) {
    follow_predecessor();
    int source = rows[blockIdx.x];
    if (source < 0) return;
    const float* in = x + (long long)source * width;
    float* to = out + (long long)blockIdx.x * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) to[c] = in[c];
}

extern "C" __global__ void take_tokens(int* ids,             // [n]
                                       const int* previous,  // [rows of the step before]
                                       int n, int n_previous) {
    follow_predecessor();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || ids[i] >= 0) return;
    int row = -1 - ids[i];
    ids[i] = row < n_previous ? previous[row] : 0;
}

extern "C" __global__ void finish_logits(float* logits,  // [n]
                                         long long n, float scale, float cap) {
    follow_predecessor();
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float l = logits[i] * scale;
    logits[i] = cap > 0.0f ? cap * tanhf(l / cap) : l;
}
