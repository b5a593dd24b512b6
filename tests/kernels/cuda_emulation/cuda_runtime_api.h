// The part of the CUDA runtime that the launchers use, on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <tuple>
#include <utility>

#include "fibers.h"

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

enum { cudaLaunchAttributeClusterDimension, cudaDevAttrClusterLaunch, cudaSharedmemCarveoutMaxShared = 100 };
enum {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributeNonPortableClusterSizeAllowed,
  cudaFuncAttributePreferredSharedMemoryCarveout,
};
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

// What kernels have been allowed to use; clusters beyond `largest_cluster` the GPU does not have.
namespace emulation {
inline int largest_cluster = 16;
constexpr int kResidentClusters = 5;
inline std::map<std::pair<const void*, int>, int> allowed;
template <typename Kernel>
bool can_run(Kernel kernel, const cudaLaunchConfig_t& config) {
  const void* const function = reinterpret_cast<const void*>(kernel);
  const int cluster = config.numAttrs > 0 ? static_cast<int>(config.attrs->val.clusterDim.x) : 1;
  if (cluster > 8 && !allowed[{function, cudaFuncAttributeNonPortableClusterSizeAllowed}]) return false;
  const int bytes = max(48 << 10, allowed[{function, cudaFuncAttributeMaxDynamicSharedMemorySize}]);
  return static_cast<int>(config.dynamicSmemBytes) <= bytes && cluster <= largest_cluster;
}
}  // namespace emulation

inline cudaError_t cudaFuncSetAttribute(const void* function, int attribute, int value) {
  return emulation::allowed[{function, attribute}] = value, cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, Kernel kernel, const cudaLaunchConfig_t* config) {
  return *count = emulation::can_run(kernel, *config) ? emulation::kResidentClusters : 0, cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  if (!emulation::can_run(kernel, *config)) return cudaErrorInvalidValue;
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
