// What the blocks of a cluster do together: they run at the same time and can write to each other's shared memory.
// sm_90 and newer; older hardware has clusters of one block.
#pragma once

#include <cooperative_groups.h>

#include "device.cuh"

namespace fusedmlp {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ int cluster_rank() {
  return static_cast<int>(cooperative_groups::this_cluster().block_rank());
}
__device__ __forceinline__ int cluster_size() {
  return static_cast<int>(cooperative_groups::this_cluster().num_blocks());
}
// All threads of the cluster meet; between arrive and wait there may be work that needs no other block. Of what was
// written before, the others see barriers that expect_messages() has set up, and nothing else: a release of everything
// would hold the thread up until its copies that are under way have come.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Messages: 4 or 8 bytes into another block's shared memory, counted by a barrier (mbarrier) there, which is used once.
// The block has one thread set it up; until all threads of the cluster have then met, nobody may send. The fence
// releases the barrier's beginning to the cluster, so that a relaxed arrival is enough. The announcement need not be
// seen before messages count: they may take the count below zero, and the phase cannot end before the one arrival.
__device__ __forceinline__ void expect_messages(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// A value to `place`, which is aligned to its size, of block `rank`.
template <typename V>
__device__ __forceinline__ void send(V* place, int rank, V value, uint64_t* barrier) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8);
  uint32_t there, barrier_there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier_there) : "r"(shared_address(barrier)), "r"(rank));
  uint32_t words[sizeof(V) / 4];
  __builtin_memcpy(words, &value, sizeof(V));
  if constexpr (sizeof(V) == 4) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
                 "r"(words[0]), "r"(barrier_there)
                 : "memory");
  } else {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(there),
                 "r"(words[0]), "r"(words[1]), "r"(barrier_there)
                 : "memory");
  }
}
// Until all bytes are there, for the thread that waits.
__device__ __forceinline__ void wait_for_messages(uint64_t* barrier) {
  uint32_t over = 0;
  while (!over) {
    asm volatile(
        "{\n .reg .pred over;\n"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%1], 0;\n"
        " selp.u32 %0, 1, 0, over;\n}"
        : "=r"(over)
        : "r"(shared_address(barrier))
        : "memory");
  }
}
#else

__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive_relaxed() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void expect_messages(uint64_t*, int) {}
template <typename V>
__device__ __forceinline__ void send(V*, int, V, uint64_t*) {}
__device__ __forceinline__ void wait_for_messages(uint64_t*) {}
#endif

}  // namespace fusedmlp
