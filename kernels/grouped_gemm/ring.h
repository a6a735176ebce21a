// A warp's own ring of slots in shared memory, through which its weights come: asked for long before they are
// needed, in the order in which they are needed. Nobody but the warp waits for them.
//
// From sm_90 on a slot is filled by one bulk copy, which a single lane asks for and a barrier in shared memory counts
// the bytes of; before that by copies of 16 bytes a lane. In the simulator copies end at once.
#pragma once
#include "gpu.h"
#if GPU_CUDA && __CUDA_ARCH__ >= 900
#define GPU_HAS_BULK_COPIES 1
#endif

// Slots of `room` bytes. data: [slots][room], and barriers [slots], the warp's own.
template <int slots, int room> struct Ring {
  uint8_t *data;
  uint64_t *barriers;
  int lane;
  int put = 0, got = 0, parity = 0;

#if GPU_HAS_BULK_COPIES
  uint64_t policy;
  __device__ __forceinline__ static uint32_t address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

  __device__ __forceinline__ Ring(uint8_t *data, uint64_t *barriers, int lane, bool used = true)
      : data(data), barriers(barriers), lane(lane) {
    // Weights are read once: they should not drive activations and outputs from L2.
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    if (used && lane == 0) {
#pragma unroll 1
      for (int i = 0; i < slots; ++i)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(barriers + i)) : "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
  }
  // Begins to fill the next slot with `bytes`, a multiple of 16; nothing where that is 0. All lanes have read what the slot
  // held.
  __device__ __forceinline__ void ask(const uint8_t *from, int bytes) {
    if (bytes == 0) return;
    if (lane == 0) {
      const uint32_t barrier = address(barriers + put);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                   ::"r"(address(data + put * room)), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
    }
    put = put + 1 == slots ? 0 : put + 1;
  }
  // The next slot, once it is filled.
  __device__ __forceinline__ const uint8_t *wait() {
    asm volatile("{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra wait;\n}"
                 ::"r"(address(barriers + got)), "r"(parity) : "memory");
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
