// Experts for few tokens each, by integer dot products, rows read where they lie.
//
//   moe_gate_up  hidden[a] = act(gate . x[a / top_k] + b_gate) * (up . x[a / top_k] + b_up), in float32 and 8-bit blocks
//   moe_down     out[a] = down . hidden[a] + b_down
//   moe_down_sum out[t] (+)= scale * sum over slots s of weights[t][s] * (down . hidden[t * top_k + s] + b_down), as
//                moe_down and moe_combine make it, bit for bit
//
// Grid y = items (an expert and up to TOKEN_TILE of its assignments; blocks beyond the last item end at once, so the
// grid does not depend on the routing). moe_gate_up: grid x = 32 hidden rows, one 8-bit block, so that the block that
// computes it also quantises it; 32 * ROW_LANES / LANE_ROWS threads. moe_down: grid x = BLOCK_WARPS * 32 / ROW_LANES *
// LANE_ROWS rows. moe_down_sum: grid x = 32 / ROW_LANES * LANE_ROWS rows, y = tokens; a warp a slot, in turn.
// -DFORMAT_GATE -DFORMAT_UP -DGATED 0 1, or -DFORMAT_DOWN; -DEXPERT_FACTORS 0 1; -DTOKEN_TILE 1 2 4 8;
// -DROW_LANES 4 8 16 32; -DLANE_ROWS 1 2 4; -DBLOCK_WARPS; -DITEM_PAGES 0 1. Moves the rows of the
// experts in use, once per tile of tokens.

#define SETTLED_WEIGHTS
#include "common/act_store.cuh"
#include "common/experts.cuh"
#include "common/follow.cuh"
#include "common/math.cuh"
#include "matmul/rows.cuh"

#ifdef FORMAT_UP

#define UP_THREADS (32 * ROW_LANES / LANE_ROWS)

// sums[t][0 = gate, 1 = up][hidden row of the block]
typedef float HiddenSums[TOKEN_TILE][2][32];

template <int R>
__device__ __forceinline__ void keep_sums(HiddenSums& sums, int matrix, int local, int lane, const float (&acc)[R][TOKEN_TILE],
                                          int first) {
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
#pragma unroll
        for (int t = 0; t < TOKEN_TILE; t++) {
            if ((r * TOKEN_TILE + t) % ROW_LANES == lane) sums[t][matrix][local + r] = acc[first + r][t];
        }
    }
}

extern "C" __global__ void __launch_bounds__(UP_THREADS, RESIDENT_THREADS / UP_THREADS)
    moe_gate_up(const float* x_f32,        // [T, width]
                const i8* x_values,        // [T, width]
                const float* x_scales,     // [T, width / 32]
                const int* x_sums,         // [T, width / 32]
                int width, ITEM_PARAMETERS,
                const i64* addresses,      // [n_experts, n_pages]
                int n_pages, int gate_first_page, int gate_rows_per_page, int gate_page_factor, int gate_row_bytes,
                int up_first_page, int up_rows_per_page, int up_page_factor, int up_row_bytes,
                const float* gate_factors, // [n_experts] with -DEXPERT_FACTORS=1
                const float* up_factors,   // the same
                const float* gate_bias,    // [n_experts, n_hidden], or null
                const float* up_bias,      // [n_experts, n_hidden], or null
                float* hidden,             // [T * top_k, n_hidden]
                ACT_PARAMETERS,                         // its 8-bit form
                int n_hidden, int activation) {
    fetch_table_ahead(addresses, n_experts, n_pages);
    follow_predecessor();
    __shared__ __align__(16) HiddenSums sums;
    Projection gate = {addresses, n_pages, gate_first_page, gate_rows_per_page, gate_page_factor, gate_row_bytes};
    Projection up = {addresses, n_pages, up_first_page, up_rows_per_page, up_page_factor, up_row_bytes};
    ActView x = {x_f32, x_values, x_scales, x_sums, width};
    int lane = threadIdx.x & 31, sub = lane % ROW_LANES;
    int local = ((threadIdx.x >> 5) * (32 / ROW_LANES) + lane / ROW_LANES) * LANE_ROWS;
    int first = blockIdx.x * 32 + local;
    Item item = ASK_ITEM(blockIdx.y);
    ItemPages pages;
    pages.ask(items, blockIdx.y);
    if (!CAN_READ(item)) return;
    int tokens[TOKEN_TILE];
#pragma unroll
    for (int t = 0; t < TOKEN_TILE; t++)
        tokens[t] = item_assignment(order, item, min(t, item.count - 1)) / top_k;
    const u8* rows[2 * LANE_ROWS];
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
        int n = min(first + r, n_hidden - 1);
        rows[r] = pages.row(up, item.expert, n);
        rows[LANE_ROWS + r] = GATED ? pages.row(gate, item.expert, n) : rows[r];
    }
    if constexpr (GATED && IsSame<FORMAT_GATE, FORMAT_UP>::value) {
        float acc[2 * LANE_ROWS][TOKEN_TILE];
        row_dots<FORMAT_UP, ROW_LANES, 2 * LANE_ROWS, TOKEN_TILE>(rows, x, tokens, item.count, sub, acc);
        keep_sums(sums, 1, local, sub, acc, 0);
        keep_sums(sums, 0, local, sub, acc, LANE_ROWS);
    } else {
        const u8* part[LANE_ROWS];
        float acc[LANE_ROWS][TOKEN_TILE];
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++) part[r] = rows[r];
        row_dots<FORMAT_UP, ROW_LANES, LANE_ROWS, TOKEN_TILE>(part, x, tokens, item.count, sub, acc);
        keep_sums(sums, 1, local, sub, acc, 0);
        if constexpr (GATED) {
#pragma unroll
            for (int r = 0; r < LANE_ROWS; r++) part[r] = rows[LANE_ROWS + r];
            row_dots<FORMAT_GATE, ROW_LANES, LANE_ROWS, TOKEN_TILE>(part, x, tokens, item.count, sub, acc);
            keep_sums(sums, 0, local, sub, acc, 0);
        }
    }
    __syncthreads();
    // Activation and 8-bit form: a warp a token, a lane a hidden row.
    int n = blockIdx.x * 32 + lane;
    for (int t = threadIdx.x >> 5; t < min(TOKEN_TILE, item.count); t += UP_THREADS / 32) {
        i64 a = item_assignment(order, item, t);
        float v = 0.0f;
        if (n < n_hidden) {
            float u = finish_product(sums[t][1][lane], up_factors, up_bias, item.expert, n_hidden, n);
            float g = GATED ? finish_product(sums[t][0][lane], gate_factors, gate_bias, item.expert, n_hidden, n) : u;
            v = glu(activation, g, GATED ? u : 1.0f);
            hidden[a * n_hidden + n] = v;
        }
        if (act_values) store_act_block(ACT_ARGUMENTS, a, n_hidden, blockIdx.x, v);
    }
}

#else

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS * 32, RESIDENT_THREADS / (BLOCK_WARPS * 32))
    moe_down(const float* h_f32,      // [T * top_k, n_hidden]
             const i8* h_values,      // [T * top_k, n_hidden]
             const float* h_scales,   // [T * top_k, n_hidden / 32]
             const int* h_sums,       // [T * top_k, n_hidden / 32]
             int n_hidden, ITEM_PARAMETERS,
             const i64* addresses,    // [n_experts, n_pages]
             int n_pages, int first_page, int rows_per_page, int page_factor, int row_bytes,
             const float* factors,    // [n_experts] with -DEXPERT_FACTORS=1
             const float* bias,       // [n_experts, n_out], or null
             float* out,              // [T * top_k, n_out]
             int n_out) {
    Projection down = {addresses, n_pages, first_page, rows_per_page, page_factor, row_bytes};
    ActView h = {h_f32, h_values, h_scales, h_sums, n_hidden};
    int lane = threadIdx.x & 31, sub = lane % ROW_LANES;
    int group = ((int)blockIdx.x * BLOCK_WARPS + (threadIdx.x >> 5)) * (32 / ROW_LANES) + lane / ROW_LANES;
    int first = group * LANE_ROWS;
    Item item = ASK_ITEM(blockIdx.y);
    ItemPages pages;
    pages.ask(items, blockIdx.y);
    if (!CAN_READ(item)) {
        follow_predecessor();
        return;
    }
    int assignments[TOKEN_TILE];
#pragma unroll
    for (int t = 0; t < TOKEN_TILE; t++) assignments[t] = early_assignment(order, item, min(t, item.count - 1));
    const u8* rows[LANE_ROWS];
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) rows[r] = pages.row(down, item.expert, min(first + r, n_out - 1));
    follow_predecessor();
    float acc[LANE_ROWS][TOKEN_TILE];
    row_dots<FORMAT_DOWN, ROW_LANES, LANE_ROWS, TOKEN_TILE>(rows, h, assignments, item.count, sub, acc);
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
#pragma unroll
        for (int t = 0; t < TOKEN_TILE; t++) {
            bool mine = (r * TOKEN_TILE + t) % ROW_LANES == sub;
            int n = first + r;
            if (mine && n < n_out && t < item.count)
                out[(i64)assignments[t] * n_out + n] = finish_product(acc[r][t], factors, bias, item.expert, n_out, n);
        }
    }
}

#if TOKEN_TILE == 1

#define MAX_SLOTS 32
#define SUM_ROWS (32 / ROW_LANES * LANE_ROWS)  // of a block: every warp has the same rows, of other slots

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS * 32, RESIDENT_THREADS / (BLOCK_WARPS * 32))
    moe_down_sum(const float* h_f32,     // [T * top_k, n_hidden]
                 const i8* h_values,     // [T * top_k, n_hidden]
                 const float* h_scales,  // [T * top_k, n_hidden / 32]
                 const int* h_sums,      // [T * top_k, n_hidden / 32]
                 int n_hidden,
                 const i64* items,       // [T * top_k, ITEM_WORDS] with -DITEM_PAGES=1
                 const int* ids,         // [T * top_k], experts
                 int n_experts, int top_k,
                 const i64* addresses,   // [n_experts, n_pages]
                 int n_pages, int first_page, int rows_per_page, int page_factor, int row_bytes,
                 const float* factors,   // [n_experts] with -DEXPERT_FACTORS=1
                 const float* bias,      // [n_experts, n_out], or null
                 const float* weights,   // [T, top_k]
                 float* out,             // [T, n_out]
                 int n_out, int add, float scale) {
    __shared__ __align__(16) float products[MAX_SLOTS][SUM_ROWS];
    Projection down = {addresses, n_pages, first_page, rows_per_page, page_factor, row_bytes};
    ActView h = {h_f32, h_values, h_scales, h_sums, n_hidden};
    int lane = threadIdx.x & 31, sub = lane % ROW_LANES, local = lane / ROW_LANES * LANE_ROWS;
    int block_first = (int)blockIdx.x * SUM_ROWS, token = blockIdx.y;
    for (int round = 0; round < top_k; round += BLOCK_WARPS) {
        int slot = round + (threadIdx.x >> 5);
        int assignment[1] = {token * top_k + min(slot, top_k - 1)}, expert = ASK_ITEM(assignment[0]).expert;
        ItemPages pages;
        pages.ask(items, assignment[0]);
        bool chosen = (u32)expert < (u32)n_experts;  // not so in rows of padding, of whose sum nobody reads anything
        expert = chosen ? expert : 0;
        const u8* rows[LANE_ROWS];
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++) rows[r] = pages.row(down, expert, min(block_first + local + r, n_out - 1));
        auto ready = [round] {
            if (round) return;
            follow_predecessor();
        };
        float acc[LANE_ROWS][1];
        row_dots<FORMAT_DOWN, ROW_LANES, LANE_ROWS, 1>(rows, h, assignment, 1, sub, acc, ready);
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++) {
            int n = block_first + local + r;
            if (r % ROW_LANES == sub && n < n_out && slot < top_k)
                products[slot][local + r] = chosen ? finish_product(acc[r][0], factors, bias, expert, n_out, n) : 0.0f;
        }
    }
    __syncthreads();
    int n = block_first + (int)threadIdx.x;
    if (threadIdx.x >= SUM_ROWS || n >= n_out) return;
    float sum = 0.0f;
    for (int s = 0; s < top_k; s++) sum = fmaf(weights[token * top_k + s], products[s][threadIdx.x], sum);
    float* at = out + (i64)token * n_out + n;
    *at = fmaf(scale, sum, add ? *at : 0.0f);
}

#endif

#endif
