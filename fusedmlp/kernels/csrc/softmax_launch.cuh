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

// Lets a kernel have as many blocks in a cluster, and as many bytes of shared memory in a block, as `max_cluster_size`
// has asked for: more than 8 and more than 48 KB are not for every GPU of the architecture.
template <typename... Parameters>
cudaError_t allow_cluster(void (*kernel)(Parameters...), int cluster, int shared_bytes) {
  const void* function = reinterpret_cast<const void*>(kernel);
  cudaError_t error = cudaSuccess;
  if (cluster > 8) error = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess || shared_bytes <= 48 << 10) return error;
  error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  // What the driver sets apart by itself has room for fewer such blocks than a multiprocessor could run.
  return cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

// The largest cluster of such blocks that the current device, which has clusters, can run: 16, 8, 4 or 2, 1 if none.
template <typename... Parameters>
cudaError_t largest_cluster(void (*kernel)(Parameters...), int threads, int shared_bytes, int* size) {
  for (*size = 16; *size > 1; *size /= 2) {
    int clusters = 0;
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = launch_config({*size, threads, *size, shared_bytes}, nullptr, &attribute);
    if (allow_cluster(kernel, *size, shared_bytes) == cudaSuccess &&
        cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess && clusters > 0) {
      return cudaSuccess;
    }
    cudaGetLastError();  // The question's failure must not become the next launch's.
  }
  return cudaSuccess;
}

// The largest cluster that the forward pass can have.
cudaError_t max_slices(int* size);

// One row per block, or per cluster of blocks; V is what its warps exchange.
template <typename V, typename... Parameters, typename... Arguments>
cudaError_t launch_rows(void (*kernel)(Parameters...), const SoftmaxPlan& plan, int64_t M, cudaStream_t stream,
                        Arguments... arguments) {
  const cudaError_t error = allow_cluster(kernel, plan.cluster, kRowSharedBytes<V>);
  if (error != cudaSuccess) return error;
  const Grid grid = {M * plan.cluster, plan.threads, plan.cluster, kRowSharedBytes<V>};
  return launch(kernel, grid, stream, arguments...);
}

}  // namespace fusedmlp
