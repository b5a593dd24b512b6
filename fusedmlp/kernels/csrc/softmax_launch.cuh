// From a plan to a launch, the same for forward and backward.
#pragma once

#include <type_traits>

#include "launch.cuh"
#include "rows.cuh"
#include "softmax_plan.h"

namespace fusedmlp {

// Vectors that a row of N elements can touch: one more where rows begin between multiples of 16 bytes.
template <typename T>
constexpr int64_t most_row_vectors(int64_t M, int64_t N, const T* rows) {
  const bool aligned = reinterpret_cast<uintptr_t>(rows) % 16 == 0 && (M == 1 || N % kVec<T> == 0);
  return (N + (aligned ? 0 : kVec<T> - 1) + kVec<T> - 1) / kVec<T>;
}

// function(std::integral_constant<int, vectors>{}) for 1, 2, 4 and, where kMost allows it, 8.
template <int kMost, typename Function>
cudaError_t with_vectors(int vectors, Function function) {
  switch (vectors) {
    case 1:
      return function(std::integral_constant<int, 1>{});
    case 2:
      return function(std::integral_constant<int, 2>{});
    case 4:
      return function(std::integral_constant<int, 4>{});
    case 8:
      if constexpr (kMost >= 8) return function(std::integral_constant<int, 8>{});
  }
  return cudaErrorInvalidValue;
}

// One row per block, or per cluster of blocks; V is what its warps exchange.
template <typename V, typename... Parameters, typename... Arguments>
cudaError_t launch_rows(void (*kernel)(Parameters...), const SoftmaxPlan& plan, int64_t M, cudaStream_t stream,
                        Arguments... arguments) {
  if (plan.cluster > 8) {
    // More than 8 blocks is a size that not every GPU of the architecture has; `max_cluster_size` has asked for it.
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  const Grid grid = {M * plan.cluster, plan.threads, plan.cluster, kRowSharedBytes<V>};
  return launch(kernel, grid, stream, arguments...);
}

}  // namespace fusedmlp
