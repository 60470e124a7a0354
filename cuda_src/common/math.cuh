// Scalar functions that several kernels share: activations and their limits, in float32.
#pragma once

__device__ __forceinline__ float sigmoid(float z) { return 1.0f / (1.0f + __expf(-z)); }

// z sigmoid(z); the division form keeps large negative z exactly 0 instead of -inf * 0.
__device__ __forceinline__ float silu(float z) { return z / (1.0f + __expf(-z)); }

__device__ __forceinline__ float gelu_tanh(float z) {
    return 0.5f * z * (1.0f + tanhf(0.79788456080286536f * z * (1.0f + 0.044715f * z * z)));
}

__device__ __forceinline__ float relu2(float z) {
    float p = fmaxf(z, 0.0f);
    return p * p;
}

// gpt-oss: g = min(gate, 7), u = clamp(up, -7, 7), g sigmoid(1.702 g) (u + 1).
__device__ __forceinline__ float swiglu_oai(float gate, float up) {
    float g = fminf(gate, 7.0f), u = fminf(fmaxf(up, -7.0f), 7.0f);
    return g * sigmoid(1.702f * g) * (u + 1.0f);
}

// log(1 + e^z), equal to z above 20 as the models' reference has it.
__device__ __forceinline__ float softplus(float z) { return z > 20.0f ? z : log1pf(expf(z)); }

// Ids of the activations in launcher arguments (ops/cuda/launch.py has the same numbers).
enum { ACT_SILU = 0, ACT_GELU_TANH = 1, ACT_RELU2 = 2, ACT_SWIGLU_OAI = 3, ACT_IDENTITY = 4 };

// act(gate) * up.
__device__ __forceinline__ float glu(int activation, float gate, float up) {
    switch (activation) {
        case ACT_SILU: return silu(gate) * up;
        case ACT_GELU_TANH: return gelu_tanh(gate) * up;
        case ACT_RELU2: return relu2(gate) * up;
        case ACT_IDENTITY: return gate * up;
        default: return swiglu_oai(gate, up);
    }
}

// act(z), for layers without a gate.
__device__ __forceinline__ float activate(int activation, float z) {
    return glu(activation, z, activation == ACT_SWIGLU_OAI ? 0.0f : 1.0f);  // swiglu_oai adds 1 to its `up`
}
