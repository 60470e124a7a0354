// A CUDA block on the host: each thread is a fiber, warp and block operations wait for each other as on the device.
// Slow, exact, and enough for the kernels of matmul and moe. Included in front of a flattened source.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct dim3 { int x, y, z; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

static dim3 threadIdx, blockIdx, blockDim, gridDim;
alignas(16) static char host_shared[256 * 1024];

// ---- fibers
struct Fiber {
    jmp_buf state;
    ucontext_t start;
    std::unique_ptr<char[]> stack;
    bool alive, begun;
    uint64_t epoch;  // warp operations passed
};
static std::vector<Fiber> fibers;
static jmp_buf scheduler;
static int current;
static void (*body)(void*);
static void* body_arguments;
static long block_arrived, block_epoch;
struct Warp {
    uint64_t values[2][32][8];
    int arrived;
    uint64_t epoch;
};
static std::vector<Warp> warps;

static void yield_fiber() {
    if (_setjmp(fibers[current].state) == 0) _longjmp(scheduler, 1);
    threadIdx.x = current;
}
static void fiber_main() {
    body(body_arguments);
    fibers[current].alive = false;
    _longjmp(scheduler, 1);
}
static int live_in_warp(int warp) {
    int n = 0;
    for (int i = warp * 32; i < std::min<int>(warp * 32 + 32, fibers.size()); i++) n += fibers[i].alive;
    return n;
}
static void run_block(int n_threads) {
    fibers.resize(n_threads);
    warps.assign((n_threads + 31) / 32, Warp{});
    for (auto& f : fibers) f.alive = true, f.begun = false, f.epoch = 0;
    block_arrived = 0;
    for (bool any = true; any;) {
        any = false;
        for (int i = 0; i < n_threads; i++) {
            Fiber& f = fibers[i];
            if (!f.alive) continue;
            any = true;
            current = threadIdx.x = i;
            if (_setjmp(scheduler) == 0) {
                if (f.begun) _longjmp(f.state, 1);
                f.begun = true;
                if (!f.stack) f.stack.reset(new char[128 * 1024]);
                getcontext(&f.start);
                f.start.uc_stack.ss_sp = f.stack.get();
                f.start.uc_stack.ss_size = 128 * 1024;
                f.start.uc_link = nullptr;
                makecontext(&f.start, fiber_main, 0);
                setcontext(&f.start);
            }
        }
    }
}
static inline void __syncthreads() {
    long epoch = block_epoch;
    block_arrived++;
    for (;;) {
        long live = 0;
        for (auto& f : fibers) live += f.alive;
        if (block_epoch != epoch) return;
        if (block_arrived >= live) {
            block_arrived = 0;
            block_epoch++;
            return;
        }
        yield_fiber();
    }
}
// Every live lane of the warp brings n words; afterwards all can read them until their next operation but one.
static inline uint64_t (*exchange(const uint64_t* words, int n))[8] {
    int warp = current / 32, lane = current % 32;
    Warp& w = warps[warp];
    uint64_t mine = fibers[current].epoch++;
    std::memcpy(w.values[mine & 1][lane], words, n * sizeof(uint64_t));
    w.arrived++;
    while (w.epoch == mine) {
        if (w.arrived >= live_in_warp(warp)) {
            w.arrived = 0;
            w.epoch++;
        } else {
            yield_fiber();
        }
    }
    return w.values[mine & 1];
}
template <class T>
static inline T lane_value(uint64_t (*values)[8], int lane) {
    T v;
    std::memcpy(&v, values[lane], sizeof(T));
    return v;
}
template <class T>
static inline uint64_t (*share(T v))[8] {
    uint64_t word = 0;
    std::memcpy(&word, &v, sizeof(T));
    return exchange(&word, 1);
}
template <class T>
static inline T __shfl_xor_sync(unsigned, T v, int mask) { return lane_value<T>(share(v), (current % 32) ^ mask); }
template <class T>
static inline T __shfl_sync(unsigned, T v, int lane) { return lane_value<T>(share(v), lane & 31); }
template <class T>
static inline T __shfl_up_sync(unsigned, T v, int by) {
    int lane = current % 32;
    auto all = share(v);
    return lane_value<T>(all, lane >= by ? lane - by : lane);
}
static inline int __reduce_add_sync(unsigned, int v) {
    auto all = share(v);
    int sum = 0;
    for (int i = 0; i < 32; i++) sum += lane_value<int>(all, i);
    return sum;
}
static inline unsigned __reduce_max_sync(unsigned, unsigned v) {
    auto all = share(v);
    unsigned most = 0;
    for (int i = 0; i < 32; i++) most = std::max(most, lane_value<unsigned>(all, i));
    return most;
}
static inline unsigned __reduce_min_sync(unsigned, unsigned v) {
    auto all = share(v);
    unsigned least = ~0u;
    for (int i = 0; i < 32; i++) least = std::min(least, lane_value<unsigned>(all, i));
    return least;
}
static inline unsigned __match_any_sync(unsigned, int v) {
    auto all = share(v);
    unsigned mask = 0;
    for (int i = 0; i < 32; i++) mask |= (unsigned)(lane_value<int>(all, i) == v) << i;
    return mask;
}
static inline void __syncwarp() { share(0); }
static inline int atomicAdd(int* p, int v) {
    int old = *p;
    *p += v;
    return old;
}

// ---- arithmetic
using std::max;
using std::min;
template <typename T>
static inline T __ldg(const T* p) {
    if ((uintptr_t)p % std::min<size_t>(sizeof(T), 16)) {
        std::fprintf(stderr, "misaligned load of %zu bytes at %p\n", sizeof(T), (const void*)p);
        std::abort();
    }
    T v;
    std::memcpy(&v, p, sizeof(T));
    return v;
}
template <class To, class From>
static inline To bits_as(From x) {
    To y;
    std::memcpy(&y, &x, sizeof(To));
    return y;
}
static inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
static inline float __int_as_float(int x) { return bits_as<float>(x); }
static inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
static inline int __float2int_rn(float x) { return (int)std::lrintf(x); }
static inline float fast_exp(float x) { return std::exp(x); }
#define __expf fast_exp  // the C library has a function of that name
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
    return (unsigned)(((((uint64_t)hi) << 32) | lo) >> (shift & 31));
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = ((uint64_t)b << 32) | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        unsigned s = (selector >> (4 * i)) & 15, byte = (unsigned)(bytes >> (8 * (s & 7))) & 255;
        if (s & 8) byte = byte & 128 ? 255 : 0;
        out |= byte << (8 * i);
    }
    return out;
}
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(int8_t)(a >> (8 * i)) * (int)(int8_t)(b >> (8 * i));
    return c;
}

// ---- halves
typedef _Float16 __half;
struct __half2 { __half x, y; };
static inline __half __ushort_as_half(unsigned short x) { return bits_as<__half>(x); }
static inline float __half2float(__half h) { return (float)h; }
static inline __half2 __floats2half2_rn(float x, float y) { return {(__half)x, (__half)y}; }
static inline __half2 __float2half2_rn(float x) { return {(__half)x, (__half)x}; }
static inline __half2 __hsub2(__half2 a, __half2 b) { return {(__half)(a.x - b.x), (__half)(a.y - b.y)}; }
static inline __half2 __hmul2(__half2 a, __half2 b) { return {(__half)(a.x * b.x), (__half)(a.y * b.y)}; }
static inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {(__half)((float)a.x * (float)b.x + (float)c.x), (__half)((float)a.y * (float)b.y + (float)c.y)};
}

static inline __half __float2half_rn(float x) { return (__half)x; }
static inline float2 __half22float2(__half2 h) { return {(float)h.x, (float)h.y}; }

// ---- blocks run one after the other, so what one wrote is there for the next
static inline void __threadfence() {}
static inline unsigned atomicInc(unsigned* p, unsigned limit) {
    unsigned old = *p;
    *p = old >= limit ? 0 : old + 1;
    return old;
}
template <class T>
static inline T atomicAdd(T* p, T v) {
    T old = *p;
    *p += v;
    return old;
}
static inline int atomicMin(int* p, int v) {
    int old = *p;
    *p = std::min(old, v);
    return old;
}
template <typename T>
static inline T __ldcg(const T* p) { return __ldg(p); }
static inline unsigned __ballot_sync(unsigned, bool v) {
    auto all = share((int)v);
    unsigned mask = 0;
    for (int i = 0; i < 32; i++) mask |= (unsigned)(lane_value<int>(all, i) != 0) << i;
    return mask;
}
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }

// ---- what the sources write in PTX (their definitions are cut out of the text)
static inline unsigned shared_address(const void*) { return 0; }
static inline void copy_async16(void* shared, const void* global, bool wanted) {
    if ((uintptr_t)shared % 16 || (wanted && (uintptr_t)global % 16)) std::abort();
    if (wanted) std::memcpy(shared, global, 16);
    else std::memset(shared, 0, 16);
}
static inline void commit_copies() {}
template <int N>
static inline void wait_copies() {}
static inline void load_matrices(unsigned (&r)[4], const __half* row) {
    auto all = share(row);
    int lane = current % 32;
    for (int i = 0; i < 4; i++) {
        const __half* from = lane_value<const __half*>(all, i * 8 + lane / 4);
        if ((uintptr_t)from % 16) std::abort();
        std::memcpy(&r[i], from + 2 * (lane % 4), 4);
    }
}
static inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    uint64_t words[3] = {a[0] | (uint64_t)a[1] << 32, a[2] | (uint64_t)a[3] << 32, b0 | (uint64_t)b1 << 32};
    auto all = exchange(words, 3);
    int lane = current % 32;
    auto half_at = [&](int from, int reg, int h) { return (float)((const __half*)all[from])[2 * reg + h]; };
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + (i & 2) * 4, column = 2 * (lane % 4) + (i & 1);
        for (int k = 0; k < 16; k++) {
            int t = k % 8 / 2;
            float w = half_at(row % 8 * 4 + t, (row >= 8) + 2 * (k >= 8), k & 1);
            c[i] += w * half_at(column * 4 + t, 4 + (k >= 8), k & 1);
        }
    }
}

static inline void multiply_add_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    uint64_t words[3] = {a[0] | (uint64_t)a[1] << 32, a[2] | (uint64_t)a[3] << 32, b0 | (uint64_t)b1 << 32};
    auto all = exchange(words, 3);
    int lane = current % 32;
    auto value_at = [&](int from, int reg) {  // only the upper 19 bits count
        return __uint_as_float((unsigned)(all[from][reg / 2] >> (32 * (reg % 2))) & 0xffffe000u);
    };
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + (i & 2) * 4, column = 2 * (lane % 4) + (i & 1);
        for (int k = 0; k < 8; k++)
            c[i] += value_at(row % 8 * 4 + k % 4, row / 8 + k / 4 * 2) * value_at(column * 4 + k % 4, 4 + k / 4);
    }
}

static inline void copy_async_float(float* shared, const float* global) { *shared = *global; }
template <class E>
static inline void load_matrices_transposed(unsigned (&r)[4], const E* row) {
    auto all = share(row);
    int lane = current % 32;
    for (int i = 0; i < 4; i++) {
        E pair[2];
        for (int h = 0; h < 2; h++) pair[h] = lane_value<const E*>(all, i * 8 + 2 * (lane % 4) + h)[lane / 4];
        std::memcpy(&r[i], pair, 4);
    }
}
static inline unsigned transpose_matrix(unsigned r) {
    auto all = share(r);
    int lane = current % 32;
    unsigned out = 0;
    for (int h = 0; h < 2; h++) {
        int row = 2 * (lane % 4) + h, column = lane / 4;  // of the matrix that the warp brought
        out |= (lane_value<unsigned>(all, row * 4 + column / 2) >> (16 * (column % 2)) & 0xffffu) << (16 * h);
    }
    return out;
}

// ---- launching: arguments are packed one after the other, each as the kernel's parameter type
template <class... P, size_t... I>
static void call_kernel(void (*kernel)(P...), const void** values, std::index_sequence<I...>) {
    kernel(*(P*)values[I]...);
}
template <class... P>
static void launch(void (*kernel)(P...), const int* dims, const void** values) {
    struct Bound {
        void (*kernel)(P...);
        const void** values;
    };
    Bound bound = {kernel, values};
    body = [](void* p) {
        Bound* b = (Bound*)p;
        call_kernel(b->kernel, b->values, std::index_sequence_for<P...>{});
    };
    body_arguments = &bound;
    gridDim = {dims[0], dims[1], dims[2]};
    blockDim = {dims[3], dims[4], dims[5]};
    for (int z = 0; z < dims[2]; z++)
        for (int y = 0; y < dims[1]; y++)
            for (int x = 0; x < dims[0]; x++) {
                blockIdx = {x, y, z};
                std::memset(host_shared, 0xFF, sizeof(host_shared));
                run_block(dims[3] * dims[4] * dims[5]);
            }
}
