// csrc/tensors.h for CPU tensors.
#pragma once

#include <cstdint>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "kernels.h"

#define C10_CUDA_CHECK(launch) TORCH_CHECK((launch) == cudaSuccess, #launch)

namespace fusedmlp {

class Call {
 public:
  explicit Call(const at::Tensor&) {}
  at::AutoDispatchBelowAutograd no_autograd;
  const cudaStream_t stream = nullptr;
};

}  // namespace fusedmlp

#include "layouts.h"
