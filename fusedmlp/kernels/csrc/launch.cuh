// How a kernel is started, and how a dtype that is known at run time becomes a type.
#pragma once

#include <type_traits>

#include <cuda_runtime.h>

#include "device.cuh"
#include "kernels.h"

namespace fusedmlp {

template <typename V>
struct Type {
  using type = V;
};

// function(Type<T>{}) with the element type of `dtype`.
template <typename Function>
cudaError_t with_type(Dtype dtype, Function function) {
  switch (dtype) {
    case Dtype::kFloat32:
      return function(Type<float>{});
    case Dtype::kFloat16:
      return function(Type<__half>{});
    case Dtype::kBFloat16:
      return function(Type<__nv_bfloat16>{});
  }
  return cudaErrorInvalidValue;
}

// function(std::true_type{}) for tanh, function(std::false_type{}) for erf.
template <typename Function>
cudaError_t with_approximate(Approximate approximate, Function function) {
  return approximate == Approximate::kTanh ? function(std::true_type{}) : function(std::false_type{});
}

struct Grid {
  int64_t blocks;
  int threads;
  int cluster = 1;       // blocks per cluster
  int shared_bytes = 0;  // dynamic shared memory per block
};

// `cluster` is where the configuration points to.
inline cudaLaunchConfig_t launch_config(const Grid& grid, cudaStream_t stream, cudaLaunchAttribute* cluster) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = stream;
  *cluster = {};
  cluster->id = cudaLaunchAttributeClusterDimension;
  cluster->val.clusterDim.x = static_cast<unsigned>(grid.cluster);
  cluster->val.clusterDim.y = cluster->val.clusterDim.z = 1;
  config.attrs = cluster;
  config.numAttrs = grid.cluster > 1 ? 1 : 0;
  return config;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute cluster;
  const cudaLaunchConfig_t config = launch_config(grid, stream, &cluster);
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fusedmlp
