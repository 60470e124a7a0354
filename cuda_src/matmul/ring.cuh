// Packed weights of a strip on their way through shared memory: each warp has STRIP_RING slots for a step of its 16 rows,
// which its own lanes fill by asynchronous copies, so that more is under way than a lane can hold in registers. The four
// lanes that share a row copy it in whole 16 bytes, side by side, and then pick their spans out of the slot.
//
//   slot: row r at r * PITCH, 0..15 bytes into it (as many as the step starts behind a multiple of 16 in memory) the bytes
//   of elements 256 s .. 256 s + 255. PITCH is an odd number of 16 bytes: 8 rows lie in different banks.
#pragma once

#include "common/async_copy.cuh"

template <class F>
struct WeightRing {
    static constexpr int STEP_BYTES = 256 / F::BLOCK * F::BYTES;
    static constexpr bool ALIGNED = F::BYTES % 16 == 0, WHOLE_STEPS = F::BLOCK == 256;
    // Most pieces of 16 bytes that a step lies in: a row starts at a multiple of F::BYTES.
    static constexpr int CHUNKS = ALIGNED ? STEP_BYTES / 16 : (STEP_BYTES + (F::BYTES % 2 ? 30 : 29)) / 16;
    static constexpr int PITCH = 16 * (CHUNKS | 1), SLOT = 16 * PITCH;

    // Of the lower and the upper row of this lane's products: what it asks for next, and how far behind a multiple of 16
    // what it reads next starts.
    u64 asked[2];
    u32 phases[2];
    u8* slots;   // of the warp, at this lane's lower row
    int place;   // of the slot that is read and asked for next
    int n_left;  // pieces of a row that have not been asked for

    __device__ __forceinline__ WeightRing(const u8* lower_row, const u8* upper_row, int n_pieces, u8* memory)
        : asked{(u64)lower_row, (u64)upper_row},
          phases{(u32)(u64)lower_row, (u32)(u64)upper_row},
          slots(memory + (int)(threadIdx.x >> 5) * (STRIP_RING * SLOT) + ((threadIdx.x & 31) >> 2) * PITCH),
          place(0),
          n_left(n_pieces) {}

    // Asks for the next step and goes on to the next slot. LOWER, UPPER: which rows are wanted.
    template <bool LOWER, bool UPPER>
    __device__ __forceinline__ void ask() {
        if (n_left > 0) {
            int part = threadIdx.x & 3, n_bytes = WHOLE_STEPS ? STEP_BYTES : min(n_left, 8) * (STEP_BYTES / 8);
#pragma unroll
            for (int upper = 0; upper < 2; upper++) {
                if (!(upper ? UPPER : LOWER)) continue;
                u32 phase = ALIGNED ? 0u : (u32)asked[upper] & 15u;
                const u8* from = (const u8*)(asked[upper] - phase) + 16 * part;
                u8* to = slots + place + 8 * upper * PITCH + 16 * part;
#pragma unroll
                for (int i = 0; i < CHUNKS; i += 4) {
                    // All four are there, or this one may not be.
                    bool sure = WHOLE_STEPS && 16 * (i + 3) < STEP_BYTES;
                    if (sure || 16 * (i + part) < (int)phase + n_bytes) copy_async16(to + 16 * i, from + 16 * i, true);
                }
                asked[upper] += STEP_BYTES;
            }
            n_left -= 8;
        }
        commit_copies();  // of nothing beyond the last step: so the number of groups under way says which have come
        place = place + SLOT == STRIP_RING * SLOT ? 0 : place + SLOT;
    }

    // Where the oldest step of the lower or upper row lies.
    __device__ __forceinline__ const u8* row(int upper) const {
        return slots + place + 8 * upper * PITCH + (ALIGNED ? 0u : phases[upper] & 15u);
    }

    __device__ __forceinline__ void pass() {
#pragma unroll
        for (int upper = 0; upper < 2; upper++) phases[upper] += STEP_BYTES;
    }
};
