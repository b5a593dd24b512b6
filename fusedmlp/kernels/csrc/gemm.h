// Matrix products through cuBLASLt, with what its epilogues can do on the way out. Free of PyTorch.
//
// Matrices are row-major here: D (M, N) = A (M, K) @ B (K, N), accumulated in fp32.
#pragma once

#include <cstdint>
#include <functional>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "kernels.h"

namespace fusedmlp {

// What happens to a product, P = A @ B. GELU is its tanh form. `bias` has N elements, except for kRowSums, where it has
// M; `aux` is (M, N) as D.
enum class Epilogue {
  kNone,         // D = P
  kBias,         // D = P + bias
  kGelu,         // D = gelu(P)
  kGeluBias,     // D = gelu(P + bias)
  kGeluAux,      // D = gelu(P),        aux = P
  kGeluAuxBias,  // D = gelu(P + bias), aux = P + bias
  kDGelu,        // D = P * gelu'(aux)
  kDGeluSums,    // D = P * gelu'(aux), bias = column sums of D
  kRowSums,      // D = P, bias = row sums of A
};

struct Matrix {
  const void* data;
  int64_t ld;       // elements from one row to the next in memory
  bool transposed;  // memory holds the transpose, row by row
};

struct Product {
  Dtype dtype;
  bool tf32;  // fp32 inputs may be rounded to TF32
  int64_t M, N, K;
  Matrix a, b;
  void* d;  // (M, N), contiguous
  Epilogue epilogue;
  void* bias;
  void* aux;
};

struct LtContext {
  cublasLtHandle_t handle;
  cudaStream_t stream;
  int device;
  bool measure;  // time the candidate algorithms of a new problem, unless a CUDA graph is being captured
  // Memory for one product, at least until the next call.
  std::function<void*(size_t)> workspace;
};

inline bool has_aux(Epilogue epilogue) {
  return epilogue == Epilogue::kGeluAux || epilogue == Epilogue::kGeluAuxBias || epilogue == Epilogue::kDGelu ||
         epilogue == Epilogue::kDGeluSums;
}

inline bool has_gelu(Epilogue epilogue) {
  return has_aux(epilogue) || epilogue == Epilogue::kGelu || epilogue == Epilogue::kGeluBias;
}

// Whether cuBLASLt's fast kernels and its epilogues can take these sizes and addresses. How exact its GELU is, is not
// documented: it is left to results of 16 bits.
inline bool fits(const Product& p) {
  if (has_gelu(p.epilogue) && p.dtype == Dtype::kFloat32) return false;
  const auto whole = [&](int64_t elements) { return elements * size_of(p.dtype) % 16 == 0; };
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  // An auxiliary matrix needs rows of a multiple of 8 elements, whatever the dtype.
  if (has_aux(p.epilogue) && p.N % 8 != 0) return false;
  return p.M > 0 && p.N > 0 && p.K > 0 && whole(p.N) && whole(p.a.ld) && whole(p.b.ld) && aligned(p.a.data) &&
         aligned(p.b.data) && aligned(p.d) && aligned(p.bias) && aligned(p.aux);
}

// Whether the product was enqueued. It is not if it does not fit, or if cuBLASLt has no kernel for it: not every
// epilogue exists for every dtype and card. Throws std::runtime_error when cuBLASLt fails.
bool run_product(const Product& product, const LtContext& context);

}  // namespace fusedmlp
