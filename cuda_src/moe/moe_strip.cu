// Experts for some tokens each, on tensor cores, weights decoded in registers (matmul/strip.cuh), rows read where they lie.
//
//   moe_gate_up_strip  hidden[a] = act(gate . x[a / top_k] + b_gate) * (up . x[a / top_k] + b_up)
//   moe_down_strip     out[a] = down . hidden[a] + b_down
//
// Activations come as halves with one scale a row. Grid x = blocks of weight rows, y = items (an expert and up to
// STRIP_TOKENS of its assignments; blocks beyond the last item end at once). In the gated kernel a warp's rows are 8 gate
// rows and the 8 up rows of the same hidden elements, so both lie in one lane's sums.
// -DFORMAT_GATE -DFORMAT_UP -DGATED 0 1, or -DFORMAT_DOWN; -DEXPERT_FACTORS 0 1; the rest as in gemm_strip.cu.

#define SETTLED_WEIGHTS
#if STRIP_RING
#define SHARED_WEIGHTS
#endif
#include "common/experts.cuh"
#include "common/follow.cuh"
#include "common/math.cuh"
#include "matmul/strip.cuh"

// Whose sums these are is found out beside the copies of weights, where registers allow.
#define ASKS_EARLY (STRIP_RING && TOKEN_TILES == 1)

#ifdef FORMAT_UP

extern "C" __global__ void __launch_bounds__(STRIP_THREADS, STRIP_BLOCKS)
    moe_gate_up_strip(const __half* x,          // [T, width]
                      const float* x_scales,    // [T]
                      int width, ITEM_PARAMETERS,
                      const i64* addresses,     // [n_experts, n_pages]
                      int n_pages, int gate_first_page, int gate_rows_per_page, int gate_page_factor, int gate_row_bytes,
                      int up_first_page, int up_rows_per_page, int up_page_factor, int up_row_bytes,
                      const float* gate_factors, // [n_experts] with -DEXPERT_FACTORS=1
                      const float* up_factors,  // the same
                      const float* gate_bias,   // [n_experts, n_hidden], or null
                      const float* up_bias,     // [n_experts, n_hidden], or null
                      float* hidden,            // [T * top_k, n_hidden]
                      int n_hidden, int activation) {
    fetch_table_ahead(addresses, n_experts, n_pages);
    follow_predecessor();
    extern __shared__ __align__(16) __half shared[];
    Projection gate = {addresses, n_pages, gate_first_page, gate_rows_per_page, gate_page_factor, gate_row_bytes};
    Projection up = {addresses, n_pages, up_first_page, up_rows_per_page, up_page_factor, up_row_bytes};
    // Hidden element of the lower row; without a gate the upper row is 8 elements on, with one it is the same element.
    int n = GATED ? (blockIdx.x * WARPS_N + strip_warp()) * 8 + ((threadIdx.x & 31) >> 2)
                  : (int)blockIdx.x * WARPS_N * 16 + strip_row();
    int n_upper = GATED ? n : n + 8;
    int first_row = min(n, n_hidden - 1), second_row = min(n_upper, n_hidden - 1);
    Item item = ASK_ITEM(blockIdx.y);
    ItemPages pages;
    pages.ask(items, blockIdx.y);
    if (!CAN_READ(item)) return;
    const u8* lower = pages.row(GATED ? gate : up, item.expert, first_row);
    const u8* upper = pages.row(up, item.expert, second_row);
    StripSums sums;
    SumTokens<TOKEN_TILES> tokens;
    Divider token_of(top_k);
    auto ask = [&] { tokens.ask(order, item, x_scales, token_of, [](int j, int c) { return strip_token(j, c); }); };
    auto x_row = [&](int i) { return token_of(item_assignment(order, item, i)); };
    auto ready = [&] {
        if (ASKS_EARLY) ask();
    };
    if (!strip_product<FORMAT_GATE, FORMAT_UP>(lower, upper, x, width, x_row, item.count, shared, ready, sums)) return;
    if (!ASKS_EARLY) ask();
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            if (strip_token(j, c) >= item.count) continue;
            int a = tokens.assignment[j][c];
            float x_scale = tokens.scale[j][c];
            float first = sums[j][c] * x_scale, second = sums[j][c + 2] * x_scale;
            float* at = hidden + (i64)a * n_hidden;
            if (GATED) {
                if (n >= n_hidden) continue;
                float g = finish_product(first, gate_factors, gate_bias, item.expert, n_hidden, n);
                at[n] = glu(activation, g, finish_product(second, up_factors, up_bias, item.expert, n_hidden, n));
            } else {
                if (n < n_hidden)
                    at[n] = glu(activation, finish_product(first, up_factors, up_bias, item.expert, n_hidden, n), 1.0f);
                if (n_upper < n_hidden)
                    at[n_upper] =
                        glu(activation, finish_product(second, up_factors, up_bias, item.expert, n_hidden, n_upper), 1.0f);
            }
        }
    }
}

#else

extern "C" __global__ void __launch_bounds__(STRIP_THREADS, STRIP_BLOCKS)
    moe_down_strip(const __half* hidden,      // [T * top_k, n_hidden]
                   const float* h_scales,     // [T * top_k]
                   int n_hidden, ITEM_PARAMETERS,
                   const i64* addresses,      // [n_experts, n_pages]
                   int n_pages, int first_page, int rows_per_page, int page_factor, int row_bytes,
                   const float* factors,      // [n_experts] with -DEXPERT_FACTORS=1
                   const float* bias,         // [n_experts, n_out], or null
                   float* out,                // [T * top_k, n_out]
                   int n_out) {
    extern __shared__ __align__(16) __half shared[];
    Projection down = {addresses, n_pages, first_page, rows_per_page, page_factor, row_bytes};
    int row = blockIdx.x * WARPS_N * 16 + strip_row();
    int first_row = min(row, n_out - 1), second_row = min(row + 8, n_out - 1);
    Item item = ASK_ITEM(blockIdx.y);
    ItemPages pages;
    pages.ask(items, blockIdx.y);
    if (!CAN_READ(item)) {
        follow_predecessor();
        return;
    }
    const u8* lower = pages.row(down, item.expert, first_row);
    const u8* upper = pages.row(down, item.expert, second_row);
    StripSums sums;
    SumTokens<TOKEN_TILES> tokens;
    auto ask = [&] { tokens.ask(order, item, h_scales, [](int a) { return a; }, [](int j, int c) { return strip_token(j, c); }); };
    auto x_row = [&](int i) { return item_assignment(order, item, i); };
    auto ready = [&] {
        follow_predecessor();
        if (ASKS_EARLY) ask();
    };
    if (!strip_product<FORMAT_DOWN, FORMAT_DOWN>(lower, upper, hidden, n_hidden, x_row, item.count, shared, ready, sums))
        return;
    if (!ASKS_EARLY) ask();
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int n = row + (c & 2) * 4;
            if (strip_token(j, c) >= item.count || n >= n_out) continue;
            i64 a = tokens.assignment[j][c & 1];
            float v = sums[j][c] * tokens.scale[j][c & 1];
            out[a * n_out + n] = finish_product(v, factors, bias, item.expert, n_out, n);
        }
    }
}

#endif
