// The experts of a few tokens from their activations: a float32 router and the choice among its logits in one launch.
//
//   logits[t] = scale * (W x[t] + bias), and what moe/choose.cuh makes of them; with NORM_WIDTH x[t] is the norm of a row
//   of the residual stream first (matmul/normed.cuh), which the blocks also leave in memory
//
// Grid: x = BLOCK_WARPS experts, a warp each; y = tiles of TOKEN_TILE tokens. The last block of a tile chooses, a warp a
// token: it looks at `posted` until all logits are there. They are their own signal, a word each, so that nobody has to make
// sure of other writes first. Blocks start in their order, and at most gridDim.y of them wait, so the others find room.
// Sums have the order of matmul/gemv.cu with 32 lanes a row.
// -DPER_LANE as in moe/choose.cuh; -DTOKEN_TILE 1 2; -DNORM_WIDTH 0, or as in matmul/normed.cuh (then TOKEN_TILE 1);
// -DBLOCK_WARPS. Moves the router once per tile of tokens.

#define WEIGHTS_HERE

#include "common/act_store.cuh"
#include "common/follow.cuh"
#include "common/items.cuh"
#include "matmul/rows.cuh"
#include "moe/choose.cuh"
#if NORM_WIDTH
#include "matmul/normed.cuh"
#endif

#define ROW_LANES 32

// A logit as a word that is never zero; all that is no number counts alike.
__device__ __forceinline__ u32 posted_word(float logit) { return logit == logit ? ~__float_as_uint(logit) : ~0x7fc00000u; }

__device__ __forceinline__ void post(u32* at, u32 word) {
#ifdef __CUDA_ARCH__
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
#else
    *at = word;
#endif
}

// A token's logits once all are posted, by a warp, lane l those of experts l, l + 32, ...; their places are zero again.
__device__ __forceinline__ void await_posted(float (&logits)[PER_LANE], u32* posted, int n_experts) {
    int lane = threadIdx.x & 31;
    u32 words[PER_LANE];
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) words[i] = i * 32 + lane < n_experts ? (u32)load_early((const int*)posted + i * 32 + lane) : 1u;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) missing |= words[i] == 0u;
    } while (__ballot_sync(FULL_WARP, missing));
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        logits[i] = __uint_as_float(~words[i]);
        if (i * 32 + lane < n_experts) posted[i * 32 + lane] = 0u;
    }
}

// Where the pages of a token's experts lie, a line for each of its assignments, by a warp: half a warp a line. Asked for when
// the experts are known, beside what is computed of their weights.
struct ChosenLines {
    static constexpr int EACH = 4;  // words of a lane that are on their way together: lines of 8 experts
    u64 words[EACH];
    const i64* addresses;  // [n_experts, n_pages]
    int n_pages, top_k, first_assignment;

    static __device__ __forceinline__ int slot(int i) { return 2 * i + (int)((threadIdx.x & 31) / ITEM_WORDS); }

    __device__ __forceinline__ u64 page(const Chosen& chosen, int i) const {
        int column = min(max((int)(threadIdx.x % ITEM_WORDS) - 1, 0), n_pages - 1);
        return load_early(addresses + (i64)chosen.ids[min(slot(i), top_k - 1)] * n_pages + column);
    }

    __device__ __forceinline__ void ask(const Chosen& chosen) {
#pragma unroll
        for (int i = 0; i < EACH; i++) words[i] = page(chosen, i);
    }

    __device__ __forceinline__ void keep(const Chosen& chosen, i64* lines, int i, u64 word) const {
        int k = slot(i), a = first_assignment + k;
        if (k >= top_k) return;
        bool is_item = threadIdx.x % ITEM_WORDS == 0;
        lines[(i64)a * ITEM_WORDS + threadIdx.x % ITEM_WORDS] = is_item ? packed_item(chosen.ids[k], a, 1) : (i64)word;
    }

    __device__ __forceinline__ void write(const Chosen& chosen, i64* lines) const {
#pragma unroll
        for (int i = 0; i < EACH; i++) keep(chosen, lines, i, words[i]);
        for (int i = EACH; 2 * i < top_k; i++) keep(chosen, lines, i, page(chosen, i));
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS * 32)
    router(const float* x,            // [T, width]
           const float* norm_weight,  // [width], or null where NORM_WIDTH is 0
           float norm_eps,
           float* normed,             // [T, width], or null where NORM_WIDTH is 0
           ACT_PARAMETERS,            // of normed
           const float* weight,       // [n_experts, width]
           const float* biases,       // [n_experts], or null
           float weight_scale,
           float* logits,             // [T, n_experts]
           u32* posted,               // [T, n_experts], zero before and after
           const float* bias,         // [n_experts], or null
           int* ids,                  // [T, top_k]
           float* weights,            // [T, top_k]
           int width, int n_tokens, int n_experts, int top_k, int gating, int n_groups, int n_groups_used, int renormalise,
           float scale,
           const i64* addresses,      // [n_experts, n_pages], the experts' table
           int n_pages,               // at most MAX_ITEM_PAGES
           i64* lines) {              // [T * top_k, ITEM_WORDS], or null: an item for each assignment (common/items.cuh)
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first_token = blockIdx.y * TOKEN_TILE;
    int expert = blockIdx.x * BLOCK_WARPS + warp;
    __shared__ __align__(16) Chosen chosen[TOKEN_TILE];
    const u8* const rows[1] = {(const u8*)(weight + (i64)min(expert, n_experts - 1) * width)};
    float acc[1][TOKEN_TILE];
    if (lines && blockIdx.x == gridDim.x - 1) fetch_ahead(addresses, (i64)sizeof(i64) * n_experts * n_pages);
#if NORM_WIDTH
    __shared__ __align__(16) NormedRow row;
    float factor[NORM_EACH][4];
    load_norm(factor, norm_weight);
    ActView view = {row.f32, nullptr, nullptr, nullptr, NORM_WIDTH};
    int tokens[TOKEN_TILE] = {0};
    auto ready = [&] {
        follow_predecessor();
        norm_row<false>(row, x + (i64)first_token * NORM_WIDTH, factor, norm_eps);
    };
#else
    ActView view = {x, nullptr, nullptr, nullptr, width};
    int tokens[TOKEN_TILE];
#pragma unroll
    for (int t = 0; t < TOKEN_TILE; t++) tokens[t] = min(first_token + t, n_tokens - 1);
    auto ready = [] { follow_predecessor(); };
#endif
    row_dots<f32, ROW_LANES, 1, TOKEN_TILE>(rows, view, tokens, n_tokens - first_token, lane, acc, ready);
    if (lane == 0 && expert < n_experts) {
#pragma unroll
        for (int t = 0; t < TOKEN_TILE; t++) {
            float v = weight_scale * (biases ? acc[0][t] + load_constant(biases + expert) : acc[0][t]);
            i64 at = (i64)(first_token + t) * n_experts + expert;
            if (first_token + t < n_tokens) post(posted + at, posted_word(v)), logits[at] = v;
        }
    }
    int token = first_token + warp;
    if (blockIdx.x == gridDim.x - 1 && warp < TOKEN_TILE && token < n_tokens) {
        Routing routing = {bias, n_experts, top_k, gating, n_groups, n_groups_used, renormalise, scale};
        float found[PER_LANE];
        await_posted(found, posted + (i64)token * n_experts, n_experts);
        ChosenLines pages;
        pages.addresses = addresses, pages.n_pages = n_pages, pages.top_k = top_k, pages.first_assignment = token * top_k;
        auto known = [&] {
            if (lines) pages.ask(chosen[warp]);
        };
        choose_experts(routing, chosen[warp], ids + (i64)token * top_k, weights + (i64)token * top_k,
                       [&](int i, int) { return found[i]; }, known);
        if (lines) pages.write(chosen[warp], lines);
    }
#if NORM_WIDTH
    leave_normed(row, normed, ACT_ARGUMENTS, first_token, TOKEN_TILE);
#endif
}
