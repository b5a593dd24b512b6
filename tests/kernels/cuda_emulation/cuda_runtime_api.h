// The part of the CUDA runtime that the launchers use, on the CPU: a kernel runs with one fiber per CUDA thread.
//
// Fibers take turns in random order and give way only where a CUDA thread would wait (barriers, shuffles), so a missing
// barrier shows as a wrong result sooner or later. The blocks of a cluster run together, clusters one after another.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __restrict__
#define __forceinline__ inline
#define __launch_bounds__(...)

using std::max;
using std::min;
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
using cudaStream_t = void*;

struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

enum { cudaLaunchAttributeClusterDimension, cudaFuncAttributeNonPortableClusterSizeAllowed, cudaDevAttrClusterLaunch };
struct cudaLaunchAttribute {
  int id;
  struct {
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

inline cudaError_t cudaGetDevice(int*) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 1, cudaSuccess; }
inline cudaError_t cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, Kernel, const cudaLaunchConfig_t*) {
  return *count = 1, cudaSuccess;
}

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
};

struct Thread {
  dim3 index;
  Block* block = nullptr;
  int rank = 0;  // of the block in its cluster
  int64_t cluster_phase = -1;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
};

inline Thread* current = nullptr;
inline std::vector<Block>* cluster = nullptr;
inline Barrier cluster_barrier;
inline ucontext_t scheduler;
inline std::function<void()>* body = nullptr;

inline void give_way() { swapcontext(&current->context, &scheduler); }

inline void wait_until_over(Barrier& barrier, int64_t phase) {
  while (barrier.phase == phase) give_way();
}

inline void wait_at(Barrier& barrier) {
  const int64_t phase = barrier.phase;
  barrier.arrive();
  wait_until_over(barrier, phase);
}

inline void run_fiber() {
  (*body)();
  current->done = true;
  --current->block->running;
  swapcontext(&current->context, &scheduler);
}

// Runs `count` blocks, one cluster, from block number `first` on.
inline void run_cluster(unsigned first, int count, size_t shared_bytes) {
  const int threads = static_cast<int>(blockDim.x);
  require(threads <= 1024, "more than 1024 threads in a block");
  std::vector<Block> blocks(count);
  std::vector<Thread> fibers(static_cast<size_t>(count) * threads);
  cluster = &blocks;
  cluster_barrier = {count * threads};
  for (int b = 0; b < count; ++b) {
    Block& block = blocks[b];
    block.index = dim3(first + b, 0, 0);
    // Shared memory is not zero at first.
    block.shared.assign(shared_bytes, 0xff);
    block.barrier.size = block.running = threads;
    block.warps.assign((threads + 31) / 32, Barrier{32});
    block.lanes.assign(threads, 0.0f);
    for (int t = 0; t < threads; ++t) {
      Thread& fiber = fibers[static_cast<size_t>(b) * threads + t];
      fiber.index = dim3(t, 0, 0);
      fiber.block = &block;
      fiber.rank = b;
      constexpr size_t kStack = 32 << 10;
      fiber.stack.reset(new char[kStack]);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, run_fiber, 0);
    }
  }
  static std::mt19937 random(0);
  std::vector<Thread*> waiting;
  for (Thread& fiber : fibers) waiting.push_back(&fiber);
  while (!waiting.empty()) {
    std::shuffle(waiting.begin(), waiting.end(), random);
    for (Thread* fiber : waiting) {
      current = fiber;
      threadIdx = fiber->index;
      blockIdx = fiber->block->index;
      swapcontext(&scheduler, &fiber->context);
    }
    std::erase_if(waiting, [](Thread* fiber) { return fiber->done; });
  }
  cluster = nullptr;
}

}  // namespace emulation

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::tuple<Parameters...> values(arguments...);
  std::function<void()> call = [&] { std::apply(kernel, values); };
  emulation::body = &call;
  blockDim = config->blockDim;
  const int count = config->numAttrs > 0 ? static_cast<int>(config->attrs->val.clusterDim.x) : 1;
  emulation::require(count <= 16 && config->gridDim.x % count == 0, "a grid that clusters do not divide");
  for (unsigned first = 0; first < config->gridDim.x; first += count) {
    emulation::run_cluster(first, count, config->dynamicSmemBytes);
  }
  return cudaSuccess;
}
