// A warp's own ring of slots in shared memory, through which its weights come: asked for long before they are
// needed, in the order in which they are needed. Nobody but the warp waits for them.
//
// From sm_90 on a slot is filled by one bulk copy, which a single lane asks for and a barrier in shared memory counts
// the bytes of; before that by copies of 16 bytes a lane. In the simulator copies end at once.
#pragma once
#include "bulk.h"

// Slots of `room` bytes. data: [slots][room], and barriers [slots], the warp's own.
template <int slots, int room> struct Ring {
  uint8_t *data;
  uint64_t *barriers;
  int lane;
  int put = 0, got = 0, parity = 0;

#if GPU_HAS_BULK_COPIES
  uint64_t policy;
  __device__ __forceinline__ PhaseBarrier &barrier(int slot) { return reinterpret_cast<PhaseBarrier *>(barriers)[slot]; }

  __device__ __forceinline__ Ring(uint8_t *data, uint64_t *barriers, int lane, bool used = true)
      : data(data), barriers(barriers), lane(lane), policy(cache_policy(false)) {  // weights are read once
    if (used && lane == 0) {
#pragma unroll 1
      for (int i = 0; i < slots; ++i) barrier(i).init(1);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
  }
  // Begins to fill the next slot with `bytes`, a multiple of 16; nothing where that is 0. All lanes have read what the slot
  // held.
  __device__ __forceinline__ void ask(const uint8_t *from, int bytes) {
    if (bytes == 0) return;
    if (lane == 0) {
      arrive_expecting(barrier(put), bytes);
      copy_bulk(data + put * room, from, bytes, barrier(put), policy);
    }
    put = put + 1 == slots ? 0 : put + 1;
  }
  // The next slot, once it is filled.
  __device__ __forceinline__ const uint8_t *wait() {
    barrier(got).wait(parity);
    const uint8_t *slot = data + got * room;
    if (++got == slots) got = 0, parity ^= 1;
    return slot;
  }
#else
  __device__ __forceinline__ Ring(uint8_t *data, uint64_t *barriers, int lane, bool = true)
      : data(data), barriers(barriers), lane(lane) {}
  __device__ __forceinline__ void ask(const uint8_t *from, int bytes) {
#pragma unroll 1
    for (int at = lane * 16; at < bytes; at += 512) copy_async(data + put * room + at, from + at, true);
    copy_commit();  // of nothing, too: the latest `slots` groups are always those of the latest steps
    if (bytes) put = put + 1 == slots ? 0 : put + 1;
  }
  __device__ __forceinline__ const uint8_t *wait() {
    copy_wait<slots - 1>();
    __syncwarp();
    const uint8_t *slot = data + got * room;
    if (++got == slots) got = 0;
    return slot;
  }
#endif
};
