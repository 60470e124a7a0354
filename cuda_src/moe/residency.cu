// Which experts hold a layer's places in the pool: chosen on the device, after the router, inside the decode graph.
//
// moe_fetch, once per layer and step: counts what the tokens chose; gives missed experts (chosen, and in no place) an
// empty place or that of a resident which no token of this step chose; copies their bytes from host memory; then the
// table names the new place. Bytes come over the link once, and the expert kernels that follow read the pool.
//
//   score' = score * exp(-T / D) + gain * chosen,  gain = (1 - exp(-T / D)) D / T: as if the T tokens of this step had
//            come one after the other, each to count 1/e after D more
//   missed experts, the highest score' first, meet empty places, then victims, the coldest first: the longest unused (then
//   the lowest score'), or the lowest score'. Either all who are missed may come, or those above their victim.
//
// Who gets no place is brought into a loading buffer for this layer's turn (the buffers are the same for all layers), and
// read where it lies in host memory if there is none left. Every block makes the same plan from the same state and copies
// its share; the last one to end writes the new state (where nobody comes, the first one does so at once). Grid: any
// number of blocks of 256 threads (they share the copies). Moves the bytes of the missed experts that are brought.
//
// Where the copies shall run beside other kernels, moe_fetch runs as one block that plans and does not copy: the table
// names places before their bytes are there. It leaves a list of copies, who can be read now and who later. moe_bring
// makes the copies on a stream of its own. moe_border (one thread, does nothing) stands where the streams part, so that
// moe_bring finds room on the device before the expert kernels take it all, and where they meet again. Both start when all
// that they come after has ended.
//
//   copies: number of experts, then of each its home and its n_pages target pages, [1 + MAX_COMERS * (1 + buffer_pages)]
//
// Where `foretells`, the ids are what the layer's tokens will likely choose, before its turn: those who are missed come into
// places (not into buffers, which are for a turn), and nothing is counted.
//
// Who came into a place is written down, in a ring that all layers share and the host reads beside the steps:
//
//   log: entries since the start, then LOG_ENTRIES of them, number n at 1 + n % LOG_ENTRIES
//   entry, from the lowest bit: layer slot 10, comer 10, victim + 1 11 (0 = nobody had to leave), place 10, foretold 1,
//          lap of the ring 3 (from 1: says whether an entry is there yet, or gone), step 18
//
// moe_set_places (one warp): the host gives a layer's places other pages, new ones, or takes them away.

#include "common/follow.cuh"
#include "common/types.cuh"

#define MAX_EXPERTS 1024
#define MAX_COMERS 256
#define FETCH_THREADS 256
#define THREAD_EXPERTS (MAX_EXPERTS / FETCH_THREADS)
#define VECTORS 4  // of 16 bytes, under way at once in a thread
#define CHUNK_BYTES (FETCH_THREADS * VECTORS * 16)
#define LOG_ENTRIES 8192

enum { NOT_CONCERNED = 0, MISSED = 1, MAY_LEAVE = 2 };
enum { BY_RECENCY = 0, ALL_COME = 1, MOST_FILLS = 2, MOST_BUFFERED = 3, DECAY = 4 };          // control; DECAY: a float
enum { STEPS = 0, TOKENS = 1, ASKED = 2, HITS = 3, FILLS = 4, BUFFERED = 5, FORETOLD = 6, ARRIVALS = 7 };  // totals

struct FetchPlan {
    int chosen[MAX_EXPERTS];  // assignments of each expert
    u64 keys[MAX_EXPERTS];    // order among those of the same kind
    u8 kinds[MAX_EXPERTS];
    u8 empty[MAX_EXPERTS];    // place exists and nobody holds it
    int comers[MAX_COMERS], victims[MAX_COMERS], places[MAX_COMERS];  // the first n_fills of them get a place
    int n_tokens, n_asked, n_missed, n_victims, n_empty, n_fills, is_last;
};

__device__ __forceinline__ float new_score(float score, float decay, float gain, int chosen) {
    return fmaf(score, decay, gain * (float)chosen);
}

// Experts of a kind before expert e: those with a lower key (`ascending`) or a higher one; equal ones by number.
__device__ __forceinline__ int rank_of(const FetchPlan& plan, int e, int n_experts, bool ascending) {
    u64 key = plan.keys[e];
    int kind = plan.kinds[e], rank = 0;
    for (int f = 0; f < n_experts; f++) {
        u64 other = plan.keys[f];
        bool before = (ascending ? other < key : other > key) || (other == key && f < e);
        rank += plan.kinds[f] == kind && before;
    }
    return rank;
}

__device__ __forceinline__ i64 log_entry(i64 number, int step, int slot, int comer, int victim, int place, int foretold) {
    u64 lap = (u64)number / LOG_ENTRIES + 1;
    return (i64)((u64)(step & 0x3FFFF) << 45 | (lap & 7) << 42 | (u64)foretold << 41 | (u64)place << 31 |
                 (u64)(victim + 1) << 20 | (u64)comer << 10 | (u64)slot);
}

// Chunk number `chunk` of a page, by all threads of a block.
__device__ __forceinline__ void copy_chunk(i64 from_address, i64 to_address, int chunk, int page_bytes) {
    const uint4* from = (const uint4*)from_address;
    uint4* to = (uint4*)to_address;
    int first = chunk * (CHUNK_BYTES / 16) + threadIdx.x, n_vectors = page_bytes / 16;
    uint4 values[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        int at = first + v * FETCH_THREADS;
        if (at < n_vectors) values[v] = from[at];
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        int at = first + v * FETCH_THREADS;
        if (at < n_vectors) to[at] = values[v];
    }
}

extern "C" __global__ void __launch_bounds__(FETCH_THREADS)
    moe_fetch(int* ids,              // [T, top_k]; rows of padding become -1
              const int* positions,  // [T], -1 = a row of padding
              i64* addresses,        // [n_experts, n_pages], the layer's table
              const i64* homes,      // [n_experts], where all pages of an expert lie in host memory
              const i64* pages,      // [n_experts, n_pages], the pages of each place, 0 = no place
              int* holders,          // [n_experts], who holds each place, -1 = nobody
              int* place_of,         // [n_experts], -1 = in none
              int* last_used,        // [n_experts], step, 0 = never
              float* scores,         // [n_experts]
              int* counts,           // [n_experts], assignments since the start
              int* buffered,         // [n_experts], 1 = the table names a loading buffer
              int* totals,           // [8], see above
              const int* control,    // [5], see above
              const i64* buffers,    // [n_buffers, buffer_pages], pages of the loading buffers
              i64* copies,           // see above, or null = copy here
              bool* now,             // [n_experts], chosen and can be read now; like the next, with copies
              bool* later,           // [n_experts], chosen and can be read after the copies
              i64* log,              // [1 + LOG_ENTRIES], see above
              int n_buffers, int buffer_pages, int n_tokens, int top_k, int n_experts, int n_pages, int page_bytes,
              int slot,         // of the layer among those with experts, for the log
              int foretells) {  // the ids are a forecast: bring into places what is missed, count nothing
    __shared__ __align__(16) FetchPlan plan;
    int thread = threadIdx.x;
    for (int e = thread; e < n_experts; e += FETCH_THREADS) plan.chosen[e] = 0;
    if (thread == 0) {
        plan.n_tokens = plan.n_asked = plan.n_missed = plan.n_victims = plan.n_empty = plan.n_fills = 0;
    }
    if (blockIdx.x == 0) {
        fetch_ahead(pages, 8ll * n_experts * n_pages);
        fetch_ahead(holders, 4ll * n_experts);
        fetch_ahead(place_of, 4ll * n_experts);
        fetch_ahead(scores, 4ll * n_experts);
        fetch_ahead(last_used, 4ll * n_experts);
        fetch_ahead(buffered, 4ll * n_experts);
    }
    follow_predecessor();
    __syncthreads();
    // A thread's experts, and everything else that is read once: asked for together with the ids, not after them.
    int place[THREAD_EXPERTS], stamp[THREAD_EXPERTS], holder[THREAD_EXPERTS], in_buffer[THREAD_EXPERTS];
    float score[THREAD_EXPERTS];
    i64 first_page[THREAD_EXPERTS];
#pragma unroll
    for (int i = 0; i < THREAD_EXPERTS; i++) {
        int e = thread + i * FETCH_THREADS;
        if (e >= n_experts) break;
        place[i] = place_of[e], stamp[i] = last_used[e], holder[i] = holders[e], in_buffer[i] = buffered[e];
        score[i] = scores[e], first_page[i] = pages[(i64)e * n_pages];
    }
    bool by_recency = control[BY_RECENCY] != 0, all_come = control[ALL_COME] != 0;
    int may_fill = min(control[MOST_FILLS], MAX_COMERS), may_buffer = foretells ? 0 : min(control[MOST_BUFFERED], n_buffers);
    float decay_tokens = __int_as_float(control[DECAY]);
    int step = totals[STEPS] + 1;
    i64 n_logged = log[0];  // these kernels run one after the other, so nobody else writes to the log meanwhile
    for (int i = thread; i < n_tokens * top_k; i += FETCH_THREADS) {
        int e = ids[i], position = positions[i / top_k];
        if (position < 0) continue;
        if (i % top_k == 0) atomicAdd(&plan.n_tokens, 1);
        if ((u32)e < (u32)n_experts) atomicAdd(&plan.chosen[e], 1);
    }
    __syncthreads();
    // Who is concerned, and in which order.
    float time = (float)max(plan.n_tokens, 1) / decay_tokens;
    float decay = expf(-time), gain = -expm1f(-time) / time;
#pragma unroll
    for (int i = 0; i < THREAD_EXPERTS; i++) {
        int e = thread + i * FETCH_THREADS;
        if (e >= n_experts) break;
        int n = plan.chosen[e];
        bool resident = place[i] >= 0, is_empty = first_page[i] != 0 && holder[i] < 0;
        score[i] = new_score(score[i], decay, gain, n);
        u64 heat = (u64)__float_as_uint(score[i]);  // of numbers >= 0, in their order
        int kind = n > 0 ? (resident ? NOT_CONCERNED : MISSED) : (resident ? MAY_LEAVE : NOT_CONCERNED);
        plan.kinds[e] = (u8)kind;
        plan.keys[e] = kind == MAY_LEAVE && by_recency ? (u64)(u32)stamp[i] << 32 | heat : heat;
        plan.empty[e] = is_empty;
        if (n > 0) atomicAdd(&plan.n_asked, 1);
        if (kind == MISSED) atomicAdd(&plan.n_missed, 1);
        if (kind == MAY_LEAVE) atomicAdd(&plan.n_victims, 1);
        if (is_empty) atomicAdd(&plan.n_empty, 1);
    }
    __syncthreads();
    int most = min(min(plan.n_missed, may_fill), plan.n_empty + plan.n_victims);
    bool somebody_comes = plan.n_missed > 0 && most + may_buffer > 0;
    // Nobody comes: the first block counts alone, and changes nothing by which the others see that nobody comes.
    if (!somebody_comes && blockIdx.x > 0) return;
    if (somebody_comes) {
        for (int e = thread; e < n_experts; e += FETCH_THREADS) {
            if (plan.empty[e]) {
                int rank = 0;
                for (int p = 0; p < e; p++) rank += plan.empty[p];
                if (rank < MAX_COMERS) plan.places[rank] = e, plan.victims[rank] = -1;
            }
            if (plan.kinds[e] == MISSED) {
                int rank = rank_of(plan, e, n_experts, false);
                if (rank < MAX_COMERS) plan.comers[rank] = e;
            } else if (plan.kinds[e] == MAY_LEAVE) {
                int rank = plan.n_empty + rank_of(plan, e, n_experts, true);
                if (rank < MAX_COMERS) plan.places[rank] = place_of[e], plan.victims[rank] = e;
            }
        }
        __syncthreads();
        if (thread < most) {  // keys fall on one side and rise on the other: whoever may come forms a beginning
            int victim = plan.victims[thread];
            bool comes = victim < 0 || all_come || plan.keys[victim] < plan.keys[plan.comers[thread]];
            if (comes) atomicAdd(&plan.n_fills, 1);
        }
        __syncthreads();
    }
    int n_fills = plan.n_fills, page_chunks = (page_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    int n_buffered = min(min(plan.n_missed, MAX_COMERS) - n_fills, may_buffer);
    if (copies != nullptr) {
        int row = 1 + buffer_pages;
        if (thread == 0) copies[0] = n_fills + n_buffered;
        for (int i = thread; i < n_fills + n_buffered; i += FETCH_THREADS) copies[1 + i * row] = homes[plan.comers[i]];
        for (int k = thread; k < (n_fills + n_buffered) * n_pages; k += FETCH_THREADS) {
            int i = k / n_pages, page = k % n_pages;
            copies[1 + i * row + 1 + page] = i < n_fills ? pages[(i64)plan.places[i] * n_pages + page]
                                                         : buffers[(i64)(i - n_fills) * buffer_pages + page];
        }
        for (int e = thread; e < n_experts; e += FETCH_THREADS) {
            now[e] = plan.chosen[e] > 0 && plan.kinds[e] != MISSED;
            later[e] = plan.kinds[e] == MISSED;
        }
    } else {
        for (int c = blockIdx.x; c < (n_fills + n_buffered) * n_pages * page_chunks; c += gridDim.x) {
            int chunk = c % page_chunks, page = c / page_chunks % n_pages, i = c / page_chunks / n_pages;
            copy_chunk(homes[plan.comers[i]] + (i64)page * page_bytes,
                       i < n_fills ? pages[(i64)plan.places[i] * n_pages + page]
                                   : buffers[(i64)(i - n_fills) * buffer_pages + page],
                       chunk, page_bytes);
        }
    }
    if (somebody_comes) {
        __threadfence();
        __syncthreads();
        if (thread == 0) plan.is_last = atomicInc((u32*)totals + ARRIVALS, gridDim.x - 1) == gridDim.x - 1;
        __syncthreads();
        if (!plan.is_last) return;
        __threadfence();
    }
    // Everybody has copied, and has read what follows.
    for (int i = thread; i < n_fills * n_pages; i += FETCH_THREADS) {
        int fill = i / n_pages, page = i % n_pages, victim = plan.victims[fill], comer = plan.comers[fill];
        if (victim >= 0) addresses[(i64)victim * n_pages + page] = homes[victim] + (i64)page * page_bytes;
        addresses[(i64)comer * n_pages + page] = pages[(i64)plan.places[fill] * n_pages + page];
    }
    for (int fill = thread; fill < n_fills; fill += FETCH_THREADS) {
        if (plan.victims[fill] >= 0) place_of[plan.victims[fill]] = -1;
        place_of[plan.comers[fill]] = plan.places[fill];
        holders[plan.places[fill]] = plan.comers[fill];
        log[1 + (u64)(n_logged + fill) % LOG_ENTRIES] =
            log_entry(n_logged + fill, step, slot, plan.comers[fill], plan.victims[fill], plan.places[fill], foretells);
    }
    if (thread == 0 && n_fills > 0) log[0] = n_logged + n_fills;
    if (foretells) {  // loading buffers stay as they are: the layer's own turn gives them back
        if (thread == 0 && n_fills > 0) atomicAdd((u32*)totals + FORETOLD, (u32)n_fills);
        return;
    }
    if (somebody_comes) __syncthreads();
#pragma unroll
    for (int i = 0; i < THREAD_EXPERTS; i++) {
        int e = thread + i * FETCH_THREADS;
        if (e >= n_experts) break;
        int n = plan.chosen[e];
        // Whoever was in a buffer the last time is read at home again, unless in a place by now.
        if (in_buffer[i]) {
            buffered[e] = 0;
            if ((n_fills > 0 ? place_of[e] : place[i]) < 0) {
                for (int page = 0; page < n_pages; page++)
                    addresses[(i64)e * n_pages + page] = homes[e] + (i64)page * page_bytes;
            }
        }
        scores[e] = score[i];
        if (n == 0) continue;
        last_used[e] = step;
        atomicAdd((u32*)counts + e, (u32)n);  // nobody waits for what it returns
    }
    for (int i = thread; i < n_tokens * top_k; i += FETCH_THREADS) {
        if (positions[i / top_k] < 0) ids[i] = -1;
    }
    if (somebody_comes) __syncthreads();
    for (int i = thread; i < n_buffered * n_pages; i += FETCH_THREADS) {
        int buffer = i / n_pages, page = i % n_pages, comer = plan.comers[n_fills + buffer];
        addresses[(i64)comer * n_pages + page] = buffers[(i64)buffer * buffer_pages + page];
        buffered[comer] = 1;
    }
    if (thread == 0) {
        totals[STEPS] = step;
        atomicAdd((u32*)totals + TOKENS, (u32)plan.n_tokens);
        atomicAdd((u32*)totals + ASKED, (u32)plan.n_asked);
        atomicAdd((u32*)totals + HITS, (u32)(plan.n_asked - plan.n_missed));
        if (n_fills > 0) atomicAdd((u32*)totals + FILLS, (u32)n_fills);
        if (n_buffered > 0) atomicAdd((u32*)totals + BUFFERED, (u32)n_buffered);
    }
}

extern "C" __global__ void __launch_bounds__(FETCH_THREADS)
    moe_bring(const i64* copies, int buffer_pages, int n_pages, int page_bytes) {
    int row = 1 + buffer_pages, page_chunks = (page_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    int n_chunks = (int)copies[0] * n_pages * page_chunks;
    for (int c = blockIdx.x; c < n_chunks; c += gridDim.x) {
        int chunk = c % page_chunks, page = c / page_chunks % n_pages;
        const i64* copy = copies + 1 + c / page_chunks / n_pages * row;
        copy_chunk(copy[0] + (i64)page * page_bytes, copy[1 + page], chunk, page_bytes);
    }
}

extern "C" __global__ void moe_border(int n_threads) {}

extern "C" __global__ void
    moe_set_places(const i64* commands,  // [n, 4 + max_pages]: first expert of the layer over all layers,
                                                      // first table entry, n_pages, place, then its pages or zeros
                   i64* addresses,       // of all layers, one after the other; so are the following
                   const i64* homes, i64* pages, int* holders,
                   int* place_of, int n_commands, int max_pages, int page_bytes) {
    follow_predecessor();
    for (int c = 0; c < n_commands; c++) {
        const i64* command = commands + (i64)c * (4 + max_pages);
        i64 row = command[0], entry = command[1];
        int n_pages = (int)command[2], place = (int)command[3], holder = holders[row + place];
        const i64* given = command + 4;
        bool goes = given[0] == 0;
        __syncwarp();
        for (int j = threadIdx.x; j < n_pages; j += 32) {
            pages[entry + (i64)place * n_pages + j] = given[j];
            if (holder >= 0)
                addresses[entry + (i64)holder * n_pages + j] = goes ? homes[row + holder] + (i64)j * page_bytes : given[j];
        }
        if (threadIdx.x == 0 && goes) {
            holders[row + place] = -1;
            if (holder >= 0) place_of[row + holder] = -1;
        }
        __syncwarp();
    }
}
