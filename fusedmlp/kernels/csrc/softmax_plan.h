// How the rows of a softmax are spread over the GPU. Plain C++: it is tested without one.
//
// A row is seen as vectors of 16 bytes. It is kept on chip, read once, by the smallest group of threads that can hold
// it: some lanes of a warp, a thread block, or a cluster of blocks. Where no group can, it is read twice. Lanes and
// blocks keep it in registers, the blocks of a cluster in shared memory, which slice_plan() divides.
#pragma once

#include <cstdint>

namespace fusedmlp {

enum class Spread { kLanes, kBlock, kCluster, kTwice };

struct SoftmaxPlan {
  Spread spread;
  int vectors;  // of one thread: 1, 2, 4 or 8
  int lanes;    // threads for each row, of one block
  int threads;  // of one block; forward may have fewer where lanes hold a row
};

// A block of 512 threads leaves room for a second one on the same multiprocessor, so that one loads while the other one
// stores; 1024 threads are the last resort.
constexpr int kUsualThreads = 512;
constexpr int kMostThreads = 1024;
constexpr int kNarrowThreads = 128;

constexpr int64_t next_power_of_2(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// row_vectors: vectors that a row of N elements can touch.  most_vectors: what a thread can hold, 4 or 8.
// max_cluster: blocks that can form a cluster, 1 where there are no clusters.  most_threads: of a block, where there
// are none; a block of a cluster holds what kUsualThreads would.
constexpr SoftmaxPlan softmax_plan(int64_t row_vectors, int most_vectors, int max_cluster,
                                   int most_threads = kMostThreads) {
  if (row_vectors <= int64_t{32} * most_vectors) {
    const int lanes = static_cast<int>(next_power_of_2(row_vectors < 32 ? row_vectors : 32));
    const int vectors = static_cast<int>(next_power_of_2((row_vectors + lanes - 1) / lanes));
    return {Spread::kLanes, vectors, lanes, kNarrowThreads};
  }
  for (int threads = kUsualThreads; threads <= most_threads; threads *= 2) {
    if (row_vectors <= int64_t{threads} * most_vectors) {
      const int warps = static_cast<int>((row_vectors + 32 * most_vectors - 1) / (32 * most_vectors));
      return {Spread::kBlock, most_vectors, warps * 32, warps * 32};
    }
    if (max_cluster > 1) {
      if (row_vectors > int64_t{max_cluster} * threads * most_vectors) break;
      return {Spread::kCluster, most_vectors, threads, threads};
    }
  }
  return {Spread::kTwice, 4, kMostThreads, kMostThreads};
}

// A row in the shared memory of a cluster (softmax_cluster.cuh): one of x forward, one of dy and one of y backward.
struct SlicePlan {
  int vectors;       // that a thread has at most, of all its operands: 8 or 16
  int cluster;       // blocks for each row
  int per_warp;      // vectors of one warp, of each operand
  int shared_bytes;  // of one block
};

constexpr int kSliceThreads = 256;
constexpr int kSliceWarps = kSliceThreads / 32;
constexpr int kMostSliceVectors = 16;

// Blocks that the registers of a multiprocessor have room for: 40 for each thread.
constexpr int kSliceBlocks = 6;

// The slice, up to 8 bytes from each warp of the row, and the barrier that counts them.
constexpr int slice_shared_bytes(int vectors_of_warp, int cluster) {
  return kSliceWarps * (vectors_of_warp * 16 + cluster * 8) + 8;
}
constexpr int kMostSliceBytes = slice_shared_bytes(kMostSliceVectors * 32, 16);

// Bytes of rows that a multiprocessor of 228 KB holds, where each block also takes 1 KB for the system.
constexpr int64_t resident_bytes(const SlicePlan& plan, int operands) {
  const int by_memory = (228 << 10) / (plan.shared_bytes + (1 << 10));
  const int blocks = by_memory < kSliceBlocks ? by_memory : kSliceBlocks;
  return int64_t{blocks} * kSliceWarps * operands * plan.per_warp * 16;
}

constexpr SlicePlan slice_plan_of(int vectors, int64_t row_vectors, int operands, int max_cluster) {
  int cluster = 2;
  while (cluster < max_cluster && row_vectors * operands > int64_t{cluster} * kSliceThreads * vectors) cluster *= 2;
  // Every warp begins at a multiple of 128 bytes, where rows do.
  const int64_t at_a_time = int64_t{8} * kSliceWarps * cluster;
  const int per_warp = static_cast<int>((row_vectors + at_a_time - 1) / at_a_time) * 8;
  return {vectors, cluster, per_warp, slice_shared_bytes(operands * per_warp, cluster)};
}

// For rows that clusters of `max_cluster` blocks hold at all. Of slices for which a thread has up to 8 or 16 vectors,
// those that leave more on its way at a time; smaller ones if it is the same.
constexpr SlicePlan slice_plan(int64_t row_vectors, int operands, int max_cluster) {
  const SlicePlan small = slice_plan_of(8, row_vectors, operands, max_cluster);
  const SlicePlan large = slice_plan_of(16, row_vectors, operands, max_cluster);
  if (operands * small.per_warp > 8 * 32) return large;
  return resident_bytes(large, operands) > resident_bytes(small, operands) ? large : small;
}

// How many rows later the one is that a cluster asks the L2 cache for, 0 for none; `resident` rows are read at a time.
// A quarter is what was best on an H200; at half the gain is gone, and at all of it a third of the speed.
constexpr int rows_ahead(int resident) { return resident / 4; }

}  // namespace fusedmlp
