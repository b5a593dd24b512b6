// How the rows of a softmax are spread over the GPU. Plain C++: it is tested without one.
//
// A row is seen as vectors of 16 bytes. It is kept on chip, read once, by the smallest group of threads that can hold
// it: some lanes of a warp, a thread block, or a cluster of blocks. Where no group can, it is read twice.
#pragma once

#include <cstdint>

namespace fusedmlp {

enum class Spread { kLanes, kBlock, kCluster, kTwice };

struct SoftmaxPlan {
  Spread spread;
  int vectors;  // of one thread: 1, 2, 4 or 8
  int lanes;    // threads for each row, of one block
  int threads;  // of one block
  int cluster;  // blocks for each row
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
// max_cluster: blocks that can form a cluster, 1 where there are no clusters.  most_threads: of a block.
constexpr SoftmaxPlan softmax_plan(int64_t row_vectors, int most_vectors, int max_cluster,
                                   int most_threads = kMostThreads) {
  if (row_vectors <= int64_t{32} * most_vectors) {
    const int lanes = static_cast<int>(next_power_of_2(row_vectors < 32 ? row_vectors : 32));
    const int vectors = static_cast<int>(next_power_of_2((row_vectors + lanes - 1) / lanes));
    return {Spread::kLanes, vectors, lanes, kNarrowThreads, 1};
  }
  for (int threads = kUsualThreads; threads <= most_threads; threads *= 2) {
    if (row_vectors <= int64_t{threads} * most_vectors) {
      const int warps = static_cast<int>((row_vectors + 32 * most_vectors - 1) / (32 * most_vectors));
      return {Spread::kBlock, most_vectors, warps * 32, warps * 32, 1};
    }
    // More than 8 blocks of this size would need more multiprocessors than every GPU has side by side.
    const int most_blocks = threads == kMostThreads && max_cluster > 8 ? 8 : max_cluster;
    for (int cluster = 2; cluster <= most_blocks; cluster *= 2) {
      if (row_vectors <= int64_t{cluster} * threads * most_vectors) {
        return {Spread::kCluster, most_vectors, threads, threads, cluster};
      }
    }
  }
  return {Spread::kTwice, 4, kMostThreads, kMostThreads, 1};
}

}  // namespace fusedmlp
