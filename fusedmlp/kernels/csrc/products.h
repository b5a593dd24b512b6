// Matrix products and sums over rows on tensors, each with the fall-back for what cuBLASLt does not take.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "gemm.h"
#include "tensors.h"

namespace fusedmlp {

// D (M, N) = a (M, K) @ b (K, N) with an epilogue, into the contiguous `d`. Whether cuBLASLt took it.
bool product(const Call& call, Epilogue epilogue, const at::Tensor& a, const at::Tensor& b, const at::Tensor& d,
             const at::Tensor& bias = {}, const at::Tensor& aux = {});

// a (M, K) @ b (K, N), any sizes and strides.
at::Tensor matmul(const Call& call, const at::Tensor& a, const at::Tensor& b);

// x (M, K) @ weight.T + bias, weight (N, K).
at::Tensor linear(const Call& call, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// Sums over the rows of x (M, N), (N,).
at::Tensor column_sums(const Call& call, const at::Tensor& x);

// dpreact = dy * gelu'(preact), (M, N), and its column sums, (N,), if needed.
std::pair<at::Tensor, at::Tensor> dgelu_dbias(const Call& call, const at::Tensor& dy, const at::Tensor& preact,
                                              Approximate approximate, bool need_dbias);

// act = gelu(preact)
at::Tensor gelu_of(const Call& call, const at::Tensor& preact, Approximate approximate);

// Ways to compute the same thing. Runs the fastest one: timed once for each `what`, problem, dtype and device. While a
// CUDA graph is captured, after many problems, and where PyTorch is asked for deterministic algorithms, the first one
// that can run. Each way returns false if it cannot.
enum class What : int64_t { kLinearGelu, kWeightGradient, kHidden };
void run_fastest(const Call& call, What what, const at::Tensor& like, std::array<int64_t, 5> problem,
                 const std::vector<std::function<bool()>>& ways);

}  // namespace fusedmlp
