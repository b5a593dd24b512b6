#pragma once

#include <cublasLt.h>

namespace at::cuda {
inline cublasLtHandle_t getCurrentCUDABlasLtHandle() { return nullptr; }
}  // namespace at::cuda
