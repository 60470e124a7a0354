// Packed weights of a strip on their way through shared memory: each warp has STRIP_RING slots for a step of its 16 rows,
// which its own lanes fill by asynchronous copies, so that more is under way than a lane can hold in registers. Neighbouring
// lanes copy neighbouring 16 bytes, since an access takes as long as it touches lines of the cache; then the four lanes of a
// row pick their spans out of the slot.
//
//   slot: row r at r * PITCH, 0..15 bytes into it (as many as the step starts behind a multiple of 16 in memory) the bytes
//   of elements 256 s .. 256 s + 255. PITCH is an odd number of 16 bytes: 8 rows lie in different banks.
#pragma once

#include "common/async_copy.cuh"
#include "common/warp.cuh"

template <class F>
struct WeightRing {
    static constexpr int STEP_BYTES = 256 / F::BLOCK * F::BYTES;
    static constexpr bool ALIGNED = F::BYTES % 16 == 0, WHOLE_STEPS = F::BLOCK == 256;
    // Most pieces of 16 bytes that a step lies in: a row starts at a multiple of F::BYTES.
    static constexpr int CHUNKS = ALIGNED ? STEP_BYTES / 16 : (STEP_BYTES + (F::BYTES % 2 ? 30 : 29)) / 16;
    static constexpr int COLUMNS = CHUNKS | 1, PITCH = 16 * COLUMNS, SLOT = 16 * PITCH;
    static constexpr int COPIES = (16 * COLUMNS + 31) / 32;
    // All pieces hold wanted bytes, wherever a step starts.
    static constexpr bool ALL_WANTED = WHOLE_STEPS && 16 * (CHUNKS - 1) < STEP_BYTES;

    u64 asked[COPIES];  // what this lane copies next: pieces lane, lane + 32, ... of the slot
    u32 phases[2];      // how far behind a multiple of 16 what this lane reads next starts, of its lower and its upper row
    u8* slots;          // of the warp
    int place;          // of the slot that is read and asked for next
    int n_left;         // pieces (of 32 elements) of a row that have not been asked for

    __device__ __forceinline__ WeightRing(const u8* lower_row, const u8* upper_row, int n_pieces, u8* memory)
        : phases{(u32)(u64)lower_row, (u32)(u64)upper_row},
          slots(memory + (int)(threadIdx.x >> 5) * (STRIP_RING * SLOT)),
          place(0),
          n_left(n_pieces) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            int row = row_of(i), from = 4 * (row & 7);  // lane 4 g has rows g and g + 8
            u64 lower = 0, upper = 0;
            if (32 * i / COLUMNS < 8) lower = __shfl_sync(FULL_WARP, (u64)lower_row, from);
            if ((32 * i + 31) / COLUMNS >= 8) upper = __shfl_sync(FULL_WARP, (u64)upper_row, from);
            asked[i] = (row < 8 ? lower : upper) + 16 * part_of(i);
        }
    }

    static __device__ __forceinline__ int row_of(int i) { return ((int)(threadIdx.x & 31) + 32 * i) / COLUMNS; }
    // What pads a row is filled with its last piece once more.
    static __device__ __forceinline__ int part_of(int i) {
        return min(((int)(threadIdx.x & 31) + 32 * i) % COLUMNS, CHUNKS - 1);
    }

    // Asks for the next step and goes on to the next slot. LOWER, UPPER: which rows are wanted.
    template <bool LOWER, bool UPPER>
    __device__ __forceinline__ void ask() {
        if (n_left > 0) {
            int n_bytes = min(n_left, 8) * (STEP_BYTES / 8);
            u8* to = slots + place + 16 * (threadIdx.x & 31);
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                u32 phase = ALIGNED ? 0u : (u32)asked[i] & 15u;
                bool wanted = 32 * (i + 1) <= 16 * COLUMNS || row_of(i) < 16;
                if (!LOWER || !UPPER) wanted = wanted && (row_of(i) < 8 ? LOWER : UPPER);
                if (!ALL_WANTED) wanted = wanted && 16 * part_of(i) < (int)phase + n_bytes;
                if (wanted) copy_async16(to + 512 * i, (const u8*)(asked[i] - phase), true);
                asked[i] += STEP_BYTES;
            }
            n_left -= 8;
        }
        commit_copies();  // of nothing beyond the last step: so the number of groups under way says which have come
        if (STRIP_RING > 1) place = place + SLOT == STRIP_RING * SLOT ? 0 : place + SLOT;
    }

    // Where the oldest step of the lower or upper row lies.
    __device__ __forceinline__ const u8* row(int upper) const {
        return slots + place + (((threadIdx.x & 31) >> 2) + 8 * upper) * PITCH + (ALIGNED ? 0u : phases[upper] & 15u);
    }

    __device__ __forceinline__ void pass() {
#pragma unroll
        for (int upper = 0; upper < 2; upper++) phases[upper] += STEP_BYTES;
    }
};
