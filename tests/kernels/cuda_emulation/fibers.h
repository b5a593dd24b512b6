// A kernel on the CPU: one fiber per CUDA thread.
//
// Fibers take turns in random order and give way only where a CUDA thread would wait (barriers, shuffles), so a missing
// barrier shows as a wrong result sooner or later. The blocks of a cluster run together, clusters one after another.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Those of the fiber that runs.
inline dim3 threadIdx, blockIdx, blockDim;

namespace emulation {

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "emulation: %s\n", what);
  std::abort();
}

struct Barrier {
  int size = 0, arrived = 0;
  int64_t phase = 0;
  void arrive() {
    if (++arrived == size) arrived = 0, ++phase;
  }
};

struct Block {
  dim3 index;
  std::vector<unsigned char> shared;
  Barrier barrier;
  std::vector<Barrier> warps;
  std::vector<float> lanes;  // what each thread hands to a shuffle
  int running = 0;
  int start = 0;  // a cluster's blocks need not start together: in which turn this one does
};

struct Thread {
  dim3 index;
  Block* block = nullptr;
  int rank = 0;  // of the block in its cluster
  int64_t cluster_phase = -1;
  ucontext_t beginning;
  jmp_buf place;  // where it gave way
  bool begun = false;
  std::unique_ptr<char[]> stack;
  bool done = false;
  std::vector<std::pair<void*, const void*>> copies;               // asked for, of 16 bytes
  std::vector<std::vector<std::pair<void*, const void*>>> groups;  // and committed
  std::vector<uint64_t*> set_up;                                   // barriers that others do not see yet
};

// In shared memory; counts bytes that are to come.
struct MessageBarrier {
  static constexpr int kSetUp = 0x5e, kReady = 0x5eed;
  int state, bytes;
};

struct Message {
  Block* block;
  void* place;
  std::vector<unsigned char> bytes;
  void* barrier;
};

inline Thread* current = nullptr;
inline std::vector<Block>* cluster = nullptr;
inline Barrier cluster_barrier;
inline jmp_buf scheduler;
inline std::function<void()>* body = nullptr;

// Not swapcontext, which asks the operating system twice, and of the time of a kernel that is most.
inline void give_way() {
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}

// Runs the fiber until it gives way.
inline void resume(Thread& fiber) {
  current = &fiber;
  threadIdx = fiber.index;
  blockIdx = fiber.block->index;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.beginning);
}

inline void wait_until_over(Barrier& barrier, int64_t phase) {
  while (barrier.phase == phase) give_way();
}

inline void wait_at(Barrier& barrier) {
  const int64_t phase = barrier.phase;
  barrier.arrive();
  wait_until_over(barrier, phase);
}

inline std::vector<Message> messages;  // on their way

// What a kernel may read ahead of, if anybody cares, and the lines of 128 bytes that it has.
inline std::vector<std::pair<uintptr_t, uintptr_t>> readable;
inline std::set<uintptr_t> prefetched;

inline MessageBarrier barrier_at(const void* place) {
  MessageBarrier barrier;
  std::memcpy(&barrier, place, sizeof(barrier));
  return barrier;
}

// In one turn of four some of the messages arrive, in any order.
inline void deliver(std::mt19937& random) {
  if (messages.empty() || random() % 4 != 0) return;
  std::shuffle(messages.begin(), messages.end(), random);
  for (size_t count = 1 + random() % messages.size(); count > 0; --count) {
    const Message& message = messages.back();
    require(message.block->running > 0, "a message to a block that has ended");
    MessageBarrier barrier = barrier_at(message.barrier);
    std::memcpy(message.place, message.bytes.data(), message.bytes.size());
    barrier.bytes -= static_cast<int>(message.bytes.size());
    require(barrier.bytes >= 0, "a message more than expected");
    std::memcpy(message.barrier, &barrier, sizeof(barrier));
    messages.pop_back();
  }
}

inline void run_fiber() {
  (*body)();
  require(current->cluster_phase < 0, "an arrive without a wait");
  current->done = true;
  --current->block->running;
  _longjmp(scheduler, 1);
}

// Runs `count` blocks, one cluster, from block number `first` on.
inline void run_cluster(unsigned first, int count, size_t shared_bytes) {
  const int threads = static_cast<int>(blockDim.x);
  require(threads <= 1024, "more than 1024 threads in a block");
  static std::mt19937 random(0);
  std::vector<Block> blocks(count);
  std::vector<Thread> fibers(static_cast<size_t>(count) * threads);
  cluster = &blocks;
  cluster_barrier = {count * threads};
  for (int b = 0; b < count; ++b) {
    Block& block = blocks[b];
    block.index = dim3(first + b, 0, 0);
    // Shared memory is not zero at first.
    block.shared.assign(shared_bytes, 0xff);
    block.barrier.size = threads;
    block.start = count > 1 ? static_cast<int>(random() % 100) : 0;
    block.warps.assign((threads + 31) / 32, Barrier{32});
    block.lanes.assign(threads, 0.0f);
    for (int t = 0; t < threads; ++t) {
      Thread& fiber = fibers[static_cast<size_t>(b) * threads + t];
      fiber.index = dim3(t, 0, 0);
      fiber.block = &block;
      fiber.rank = b;
      constexpr size_t kStack = 32 << 10;
      fiber.stack.reset(new char[kStack]);
      getcontext(&fiber.beginning);
      fiber.beginning.uc_stack.ss_sp = fiber.stack.get();
      fiber.beginning.uc_stack.ss_size = kStack;
      fiber.beginning.uc_link = nullptr;
      makecontext(&fiber.beginning, run_fiber, 0);
    }
  }
  std::vector<Thread*> waiting;
  for (Thread& fiber : fibers) waiting.push_back(&fiber);
  for (int turn = 0; !waiting.empty(); ++turn) {
    for (Block& block : blocks) {
      if (block.start == turn) block.running = threads;
    }
    std::shuffle(waiting.begin(), waiting.end(), random);
    for (Thread* fiber : waiting) {
      if (turn < fiber->block->start) continue;
      resume(*fiber);
    }
    std::erase_if(waiting, [](Thread* fiber) { return fiber->done; });
    deliver(random);
  }
  require(messages.empty(), "a message to a block that has ended");
  cluster = nullptr;
}

}  // namespace emulation
