// From a plan to a launch, the same for forward and backward.
#pragma once

#include <map>
#include <mutex>
#include <tuple>
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

// One row per block; V is what its warps exchange.
template <typename V, typename... Parameters, typename... Arguments>
cudaError_t launch_rows(void (*kernel)(Parameters...), const SoftmaxPlan& plan, int64_t M, cudaStream_t stream,
                        Arguments... arguments) {
  return launch(kernel, {M, plan.threads, 1, kRowSharedBytes<V>}, stream, arguments...);
}

// Clusters that the current device runs at a time. A kernel has to be allowed to run like that once for each device,
// and the question takes some microseconds: so both are done at the first launch.
template <typename... Parameters>
cudaError_t resident_clusters(void (*kernel)(Parameters...), const Grid& grid, int* clusters) {
  using Key = std::tuple<const void*, int, int, int>;
  static std::mutex mutex;
  static std::map<Key, int> known;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const Key key{reinterpret_cast<const void*>(kernel), device, grid.cluster, grid.shared_bytes};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return *clusters = found->second, cudaSuccess;
  error = allow_cluster(kernel, grid.cluster, kMostSliceBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = launch_config(grid, nullptr, &attribute);
  error = cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
  if (error == cudaSuccess) known[key] = *clusters;
  return error;
}

// One row per cluster, by the kernel for slices of the plan's kind. `arguments` are without the last two.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_slices(void (*small)(Parameters...), void (*large)(Parameters...), const SlicePlan& plan, int64_t M,
                          cudaStream_t stream, Arguments... arguments) {
  const auto kernel = plan.vectors == kMostSliceVectors ? large : small;
  const Grid grid = {M * plan.cluster, kSliceThreads, plan.cluster, plan.shared_bytes};
  int resident = 0;
  const cudaError_t error = resident_clusters(kernel, grid, &resident);
  if (error != cudaSuccess) return error;
  return launch(kernel, grid, stream, arguments..., plan.per_warp, rows_ahead(resident));
}

}  // namespace fusedmlp
