// What launchers take instead of a tensor's dtype, of a string, and of any layout.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/string_view.h>

#include "kernels.h"

namespace fusedmlp {

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
