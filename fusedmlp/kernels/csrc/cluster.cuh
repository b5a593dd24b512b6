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
// Between arrive and wait there may be work that needs no other block. Writes before arrive are seen after wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where `pointer`, into this block's shared memory, lies in that of block `rank`.
template <typename V>
__device__ __forceinline__ V* shared_of(V* pointer, int rank) {
  return cooperative_groups::this_cluster().map_shared_rank(pointer, rank);
}

// Messages: 8 bytes into another block's shared memory, counted by a barrier (mbarrier) there, which is used once.
// The block has one thread set it up; until all threads of the cluster have then met, nobody may send.
__device__ __forceinline__ void expect_messages(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Two fp32 to `place`, aligned to 8 bytes, of block `rank`.
__device__ __forceinline__ void send(float* place, int rank, float a, float b, uint64_t* barrier) {
  uint32_t there, barrier_there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier_there) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(there),
               "f"(a), "f"(b), "r"(barrier_there)
               : "memory");
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
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
template <typename V>
__device__ __forceinline__ V* shared_of(V* pointer, int) {
  return pointer;
}
__device__ __forceinline__ void expect_messages(uint64_t*, int) {}
__device__ __forceinline__ void send(float*, int, float, float, uint64_t*) {}
__device__ __forceinline__ void wait_for_messages(uint64_t*) {}
#endif

}  // namespace fusedmlp
