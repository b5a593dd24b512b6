// One call of an operator: the device and stream of its tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "layouts.h"

namespace fusedmlp {

// One call of an operator on the device of `x`. torch operators called inside are neither recorded for autograd nor
// changed by an autocast that is on around a backward pass.
class Call {
 public:
  explicit Call(const at::Tensor& x)
      : device_(x.device()), no_autocast_(c10::autocast_dispatch_keyset), stream(c10::cuda::getCurrentCUDAStream()) {}

 private:
  c10::cuda::CUDAGuard device_;
  at::AutoDispatchBelowAutograd no_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_;

 public:
  const cudaStream_t stream;
};

}  // namespace fusedmlp
