// Bulk copies (from sm_90 on): one thread asks, the hardware copies into shared memory and tells a PhaseBarrier how many bytes
// came, or copies from there to memory. Blocks of a cluster may share what one of them asks for. There is no simulated form.
#pragma once
#include "gpu.h"
#if GPU_CUDA && __CUDA_ARCH__ >= 900
#define GPU_HAS_BULK_COPIES 1

// A barrier in shared memory: a phase ends when `count` arrivals are in; wait(parity) returns when the phase of that
// parity, 0 for the first, has ended. arrive_after_copies: this thread's copy_async so far count as its arrival.
struct PhaseBarrier {
  uint64_t word;
  __device__ __forceinline__ uint32_t address() { return (uint32_t)__cvta_generic_to_shared(&word); }
  __device__ __forceinline__ void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(count) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  __device__ __forceinline__ void arrive(int times) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(times) : "memory");
  }
  __device__ __forceinline__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address()) : "memory");
  }
  // What other blocks of the cluster stored, and told this barrier of, can be read then.
  __device__ __forceinline__ void wait_for_cluster(int parity) {
    asm volatile("{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra wait;\n}"
                 ::"r"(address()), "r"(parity) : "memory");
  }
  __device__ __forceinline__ void wait(int parity) {
    asm volatile("{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra wait;\n}"
                 ::"r"(address()), "r"(parity) : "memory");
  }
};

// A matrix in memory and the boxes that are copied of it, as cuTensorMapEncodeTiled describes them: a __grid_constant__
// parameter of the kernel.
struct alignas(64) TensorMap { uint64_t words[16]; };

__device__ __forceinline__ uint32_t shared_address(const void *shared) { return (uint32_t)__cvta_generic_to_shared(shared); }

// This thread's arrival; the phase also waits for `bytes` of copies.
__device__ __forceinline__ void arrive_expecting(PhaseBarrier &barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier.address()), "r"(bytes) : "memory");
}
// What L2 is to do with lines that come through it: to give up first those that nobody reads again.
__device__ __forceinline__ uint64_t cache_policy(bool read_again) {
  uint64_t once, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(once));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(normal));
  return read_again ? normal : once;
}
// Addresses and bytes: multiples of 16.
__device__ __forceinline__ void copy_bulk(void *shared, const void *global, int bytes, PhaseBarrier &barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(barrier.address()), "l"(policy) : "memory");
}
// What this thread knows to be in memory is there for copies that it asks for from now on.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// The box whose first element is (column, row); what lies outside of the matrix is 0. To all `blocks` of the cluster, at
// the same place of each one's shared memory, and each one's barrier is told.
template <int blocks>
__device__ __forceinline__ void copy_box(void *shared, const TensorMap &map, int column, int row, PhaseBarrier &barrier) {
  if constexpr (blocks == 1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(shared_address(shared)), "l"(&map), "r"(column), "r"(row), "r"(barrier.address()) : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(shared_address(shared)), "l"(&map), "r"(column), "r"(row), "r"(barrier.address()),
                 "h"((uint16_t)((1 << blocks) - 1)) : "memory");
  }
}
// From this block's shared memory to the box whose first element is (column, row); what lies outside of the matrix is not
// written. Threads that stored there must have published that (fence.proxy.async) before a barrier with this one.
__device__ __forceinline__ void store_box(const TensorMap &map, int column, int row, const void *shared) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\ncp.async.bulk.commit_group;"
               ::"l"(&map), "r"(column), "r"(row), "r"(shared_address(shared)) : "memory");
}
// Returns when the boxes that this thread stored have been read: until then the block must not end, or write there.
__device__ __forceinline__ void wait_for_boxes_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Where the map lies is needed soon.
__device__ __forceinline__ void prefetch_map(const TensorMap &map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Barriers that were set up become visible to copies and to the other blocks; a barrier of all their threads must follow.
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// All threads of all blocks of the cluster meet. It orders no memory but what fences before it do.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// An arrival at the barrier that lies at the same place of another block of the cluster, or of this one.
__device__ __forceinline__ void arrive_at(PhaseBarrier &barrier, int rank) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
               ::"r"(barrier.address()), "r"(rank) : "memory");
}
// Where what lies in this block's shared memory does in that of a block of the cluster.
__device__ __forceinline__ uint32_t address_at(const void *shared, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared)), "r"(rank));
  return there;
}
// Four numbers to such an address, a multiple of 16; a barrier of that block, which expects 16 bytes, is told.
__device__ __forceinline__ void store_at(uint32_t there, const float *four, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(there), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(barrier) : "memory");
}

#endif
