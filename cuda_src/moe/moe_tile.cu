// Experts for many tokens each, on tensor cores, rows read where they lie.
//
//   moe_gate_up_tile  hidden[a] = act(gate . x[a / top_k] + b_gate) * (up . x[a / top_k] + b_up)
//   moe_down_tile     out[a] = down . hidden[a] + b_down
//
// Activations come as halves with one scale a row (scale_halves.cu). Grid x = tiles of weight rows, y = items (an expert
// and up to TILE_M of its assignments; blocks beyond the last item end at once). In a tile of the gated kernel each 16
// rows are 8 gate rows and the 8 up rows of the same hidden elements, so both lie in one thread's sums.
// -DFORMAT_GATE -DFORMAT_UP -DGATED 0 1, or -DFORMAT_DOWN; -DEXPERT_FACTORS 0 1; -DTILE_N,
// -DTILE_M as in matmul/tile.cuh.

#define SETTLED_WEIGHTS
#include "common/experts.cuh"
#include "common/follow.cuh"
#include "common/math.cuh"
#include "matmul/tile.cuh"

#ifdef FORMAT_UP

#define HIDDEN_TILE (GATED ? TILE_N / 2 : TILE_N)

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)
    moe_gate_up_tile(const __half* x,          // [T, width]
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
    follow_predecessor();
    extern __shared__ __align__(16) __half shared[];
    int first = blockIdx.x * HIDDEN_TILE, row = tile_weight_row();
    bool is_up = !GATED || (row & 8);
    Projection projection = {addresses, n_pages, is_up ? up_first_page : gate_first_page,
                             is_up ? up_rows_per_page : gate_rows_per_page,
                             is_up ? up_page_factor : gate_page_factor, is_up ? up_row_bytes : gate_row_bytes};
    int mine = first + (GATED ? (row >> 4) * 8 + (row & 7) : row);
    Item item = ASK_ITEM(blockIdx.y);
    ItemPages pages;
    pages.ask(items, blockIdx.y);
    if (!(pages.exist() && CAN_READ(item))) return;
    TileInput in;
    in.x = x;
    in.width = width;
    Divider token_of(top_k);
    int assignments[X_COPIES];
#pragma unroll
    for (int i = 0; i < X_COPIES; i++)  // all on their way at once
        assignments[i] = early_assignment(order, item, min(tile_x_row(i), item.count - 1));
    const u8* weight_row = pages.row(projection, item.expert, min(mine, n_hidden - 1));
    in.weight_row = mine < n_hidden ? weight_row : nullptr;
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) in.x_rows[i] = tile_x_row(i) < item.count ? token_of(assignments[i]) : -1;
    TileSums sums;
    if (!tile_product<FORMAT_GATE, FORMAT_UP>(in, shared, sums)) return;
    SumTokens<FRAGMENTS_M> tokens;
    tokens.ask(order, item, x_scales, token_of, [](int j, int c) { return sum_token(j, c); });
#pragma unroll
    for (int j = 0; j < FRAGMENTS_M; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            if (sum_token(j, c) >= item.count) continue;
            int a = tokens.assignment[j][c];
            float x_scale = tokens.scale[j][c];
#pragma unroll
            for (int i = 0; i < FRAGMENTS_N; i++) {
                float lower = sums[i][j][c] * x_scale, upper = sums[i][j][c + 2] * x_scale;
                if (GATED) {
                    int n = first + sum_row(i, 0) / 16 * 8 + (sum_row(i, 0) & 7);
                    if (n >= n_hidden) continue;
                    float g = finish_product(lower, gate_factors, gate_bias, item.expert, n_hidden, n);
                    float u = finish_product(upper, up_factors, up_bias, item.expert, n_hidden, n);
                    hidden[(i64)a * n_hidden + n] = glu(activation, g, u);
                } else {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        int n = first + sum_row(i, 2 * h);
                        if (n >= n_hidden) continue;
                        float u = finish_product(h ? upper : lower, up_factors, up_bias, item.expert, n_hidden, n);
                        hidden[(i64)a * n_hidden + n] = glu(activation, u, 1.0f);
                    }
                }
            }
        }
    }
}

#else

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)
    moe_down_tile(const __half* hidden,      // [T * top_k, n_hidden]
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
    int first = blockIdx.x * TILE_N, mine = first + tile_weight_row();
    Item item = ASK_ITEM(blockIdx.y);
    ItemPages pages;
    pages.ask(items, blockIdx.y);
    if (!(pages.exist() && CAN_READ(item))) {
        follow_predecessor();
        return;
    }
    TileInput in;
    in.x = hidden;
    in.width = n_hidden;
    int assignments[X_COPIES];
#pragma unroll
    for (int i = 0; i < X_COPIES; i++)
        assignments[i] = early_assignment(order, item, min(tile_x_row(i), item.count - 1));
    const u8* weight_row = pages.row(down, item.expert, min(mine, n_out - 1));
    in.weight_row = mine < n_out ? weight_row : nullptr;
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) in.x_rows[i] = tile_x_row(i) < item.count ? assignments[i] : -1;
    follow_predecessor();
    TileSums sums;
    if (!tile_product<FORMAT_DOWN, FORMAT_DOWN>(in, shared, sums)) return;
    SumTokens<FRAGMENTS_M> tokens;
    tokens.ask(order, item, h_scales, [](int a) { return a; }, [](int j, int c) { return sum_token(j, c); });
#pragma unroll
    for (int j = 0; j < FRAGMENTS_M; j++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (sum_token(j, c) >= item.count) continue;
            i64 a = tokens.assignment[j][c & 1];
            float h_scale = tokens.scale[j][c & 1];
#pragma unroll
            for (int i = 0; i < FRAGMENTS_N; i++) {
                int n = first + sum_row(i, c);
                if (n < n_out)
                    out[a * n_out + n] = finish_product(sums[i][j][c] * h_scale, factors, bias, item.expert, n_out, n);
            }
        }
    }
}

#endif
