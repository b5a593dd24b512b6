// csrc/cluster.cuh on the CPU. Messages are under way for a while, and overtake one another.
#pragma once

#include "device.cuh"

namespace fusedmlp {

inline int cluster_rank() { return emulation::current->rank; }
inline int cluster_size() { return static_cast<int>(emulation::cluster->size()); }
// Of what was written before, only barriers that have been set up are seen by others: elsewhere a message meets none.
inline void cluster_arrive_relaxed() {
  for (uint64_t* const barrier : emulation::current->set_up) {
    emulation::MessageBarrier ready = emulation::barrier_at(barrier);
    ready.state = emulation::MessageBarrier::kReady;
    *barrier = bits_as<uint64_t>(ready);
  }
  emulation::current->set_up.clear();
  emulation::require(emulation::current->cluster_phase < 0, "a second arrive without a wait");
  emulation::current->cluster_phase = emulation::cluster_barrier.phase;
  emulation::cluster_barrier.arrive();
}
inline void cluster_wait() {
  emulation::require(emulation::current->cluster_phase >= 0, "a wait without an arrive");
  emulation::wait_until_over(emulation::cluster_barrier, emulation::current->cluster_phase);
  emulation::current->cluster_phase = -1;
}
// Where `pointer`, into this block's shared memory, lies in that of block `rank`.
template <typename V>
V* shared_of(V* pointer, int rank) {
  emulation::Block &own = *emulation::current->block, &other = (*emulation::cluster)[rank];
  emulation::require(other.running == static_cast<int>(blockDim.x), "shared memory of a block that is not running");
  return reinterpret_cast<V*>(other.shared.data() + (reinterpret_cast<unsigned char*>(pointer) - own.shared.data()));
}

inline void expect_messages(uint64_t* barrier, int bytes) {
  *barrier = bits_as<uint64_t>(emulation::MessageBarrier{emulation::MessageBarrier::kSetUp, bytes});
  emulation::current->set_up.push_back(barrier);
}
template <typename V>
void send(V* place, int rank, V value, uint64_t* barrier) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8);
  emulation::require(reinterpret_cast<uintptr_t>(place) % sizeof(V) == 0, "a misaligned message");
  uint64_t* const counter = shared_of(barrier, rank);
  emulation::require(emulation::barrier_at(counter).state == emulation::MessageBarrier::kReady,
                     "a message to a block that expects none");
  const auto* const bytes = reinterpret_cast<const unsigned char*>(&value);
  emulation::messages.push_back(
      {&(*emulation::cluster)[rank], shared_of(place, rank), {bytes, bytes + sizeof(V)}, counter});
}
inline void wait_for_messages(uint64_t* barrier) {
  for (int turn = 0; emulation::barrier_at(barrier).bytes > 0; ++turn) {
    emulation::require(turn < 10000, "a message that never comes");
    emulation::give_way();
  }
}

}  // namespace fusedmlp
