// What every operator needs around a launcher: the device and stream of its tensors, dtypes, and layouts.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include "kernels.h"

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

inline Dtype dtype_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kHalf:
      return Dtype::kFloat16;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    default:
      TORCH_CHECK_TYPE(false, "fusedmlp_cuda: expected float32, float16 or bfloat16, got ", x.scalar_type());
  }
}

inline Approximate approximate_of(c10::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh",
                    "fusedmlp_cuda: approximate must be \"none\" or \"tanh\", got ", approximate);
  return approximate == "tanh" ? Approximate::kTanh : Approximate::kNone;
}

inline bool is_aligned(const at::Tensor& x) { return reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0; }

// x itself if it is contiguous and begins at a multiple of 16 bytes, else a copy that does.
inline at::Tensor aligned_contiguous(const at::Tensor& x) {
  const at::Tensor contiguous = x.contiguous();
  return is_aligned(contiguous) ? contiguous : contiguous.clone(at::MemoryFormat::Contiguous);
}

}  // namespace fusedmlp
