// The operators torch.ops.fusedmlp_cuda.*, whose schemas are in fusedmlp/kernels/cuda_ops.py.
//
// M rows (all leading dimensions of x flattened), K in_features, N out_features or hidden features, N2 the MLP's
// out_features. An output that is not asked for has no elements.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

namespace fusedmlp {

using at::Tensor;

Tensor gelu_fwd_op(const Tensor& x, c10::string_view approximate);
Tensor gelu_bwd_op(const Tensor& dy, const Tensor& x, c10::string_view approximate);
Tensor softmax_fwd_op(const Tensor& x, int64_t dim);
Tensor softmax_bwd_op(const Tensor& dy, const Tensor& y, int64_t dim);

// act (..., N) = gelu(x @ weight.T + bias), preact (M, N).
std::tuple<Tensor, Tensor> linear_gelu_fwd_op(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                              c10::string_view approximate, bool keep_preact);

// dx (..., K) if weight is given, dweight (N, K) if x is given, dbias (N,).
std::tuple<Tensor, Tensor, Tensor> linear_gelu_bwd_op(const Tensor& dy, const std::optional<Tensor>& x,
                                                      const std::optional<Tensor>& weight, const Tensor& preact,
                                                      c10::string_view approximate, bool need_dbias);

// y (..., N2) = gelu(x @ weight1.T + bias1) @ weight2.T + bias2, preact and act (M, N).
std::tuple<Tensor, Tensor, Tensor> mlp_fwd_op(const Tensor& x, const Tensor& weight1,
                                              const std::optional<Tensor>& bias1, const Tensor& weight2,
                                              const std::optional<Tensor>& bias2, c10::string_view approximate,
                                              bool keep_preact, bool keep_act);

// dx (..., K) if weight1 is given, dweight1 (N, K) if x is given, dbias1 (N,), dweight2 (N2, N) if act is given, dbias2
// (N2,). preact and weight2 are given where any of the first three is needed.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_bwd_op(
    const Tensor& dy, const std::optional<Tensor>& x, const std::optional<Tensor>& weight1,
    const std::optional<Tensor>& weight2, const std::optional<Tensor>& preact, const std::optional<Tensor>& act,
    c10::string_view approximate, bool need_dbias1, bool need_dbias2);

}  // namespace fusedmlp
