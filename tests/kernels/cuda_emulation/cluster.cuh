// csrc/cluster.cuh on the CPU. Messages are under way for a while, and overtake one another.
#pragma once

#include "device.cuh"

namespace fusedmlp {

inline int cluster_rank() { return emulation::current->rank; }
inline int cluster_size() { return static_cast<int>(emulation::cluster->size()); }
inline void cluster_arrive() {
  emulation::require(emulation::current->cluster_phase < 0, "a second arrive without a wait");
  emulation::current->cluster_phase = emulation::cluster_barrier.phase;
  emulation::cluster_barrier.arrive();
}
inline void cluster_wait() {
  emulation::require(emulation::current->cluster_phase >= 0, "a wait without an arrive");
  emulation::wait_until_over(emulation::cluster_barrier, emulation::current->cluster_phase);
  emulation::current->cluster_phase = -1;
}
template <typename V>
V* shared_of(V* pointer, int rank) {
  emulation::Block &own = *emulation::current->block, &other = (*emulation::cluster)[rank];
  emulation::require(other.running == static_cast<int>(blockDim.x), "shared memory of a block that is not running");
  return reinterpret_cast<V*>(other.shared.data() + (reinterpret_cast<unsigned char*>(pointer) - own.shared.data()));
}

inline void expect_messages(uint64_t* barrier, int bytes) {
  *barrier = bits_as<uint64_t>(emulation::MessageBarrier{emulation::MessageBarrier::kReady, bytes});
}
inline void send(float* place, int rank, float a, float b, uint64_t* barrier) {
  emulation::require(reinterpret_cast<uintptr_t>(place) % 8 == 0, "a misaligned message");
  uint64_t* const counter = shared_of(barrier, rank);
  emulation::require(emulation::barrier_at(counter).state == emulation::MessageBarrier::kReady,
                     "a message to a block that expects none");
  emulation::messages.push_back({&(*emulation::cluster)[rank], shared_of(place, rank), {a, b}, counter});
}
inline void wait_for_messages(uint64_t* barrier) {
  for (int turn = 0; emulation::barrier_at(barrier).bytes > 0; ++turn) {
    emulation::require(turn < 10000, "a message that never comes");
    emulation::give_way();
  }
}

}  // namespace fusedmlp
