// The operators of linear_gelu and mlp: which products, epilogues and kernels a call is made of.
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "operators.h"
#include "products.h"

namespace fusedmlp {
namespace {

// x (..., K) as (M, K).
Tensor matrix_of(const Tensor& x) {
  const int64_t K = x.size(-1);
  return x.dim() == 2 ? x : x.reshape({c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), K});
}

// y (M, N), which nobody else has, with the leading dimensions of x (..., K). No view for autograd: the result may be
// written in place.
Tensor shaped_as(const Tensor& x, const Tensor& y) {
  if (x.dim() == 2) return y;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = y.size(1);
  return at::_unsafe_view(y, sizes);
}

Tensor nothing(const Tensor& like) { return at::empty({0}, like.options()); }

Tensor or_undefined(const std::optional<Tensor>& x) { return x.has_value() ? *x : Tensor(); }

struct Hidden {
  Tensor act;     // (M, N)
  Tensor preact;  // (M, N), undefined where a fused epilogue did not have to write it
};

// act = gelu(x @ weight.T + bias), x (M, K).
Hidden linear_gelu(const Call& call, const Tensor& x, const Tensor& weight, const Tensor& bias, Approximate approximate,
                   bool keep_preact) {
  Hidden out;
  const auto separate = [&] {
    out.preact = linear(call, x, weight, bias);
    out.act = gelu_of(call, out.preact, approximate);
    if (!keep_preact) out.preact.reset();
    return true;
  };
  if (approximate != Approximate::kTanh) {
    separate();
    return out;
  }
  const auto fused = [&] {
    const Tensor vector = bias.defined() ? bias.contiguous() : bias;
    const Epilogue with_bias = keep_preact ? Epilogue::kGeluAuxBias : Epilogue::kGeluBias;
    const Epilogue without = keep_preact ? Epilogue::kGeluAux : Epilogue::kGelu;
    out.act = at::empty({x.size(0), weight.size(0)}, x.options());
    out.preact = keep_preact ? at::empty_like(out.act) : Tensor();
    return product(call, bias.defined() ? with_bias : without, x, weight.t(), out.act, vector, out.preact);
  };
  const int64_t flags = keep_preact + 2 * bias.defined();
  run_fastest(call, What::kLinearGelu, x, {x.size(0), x.size(1), weight.size(0), flags, 0}, {fused, separate});
  return out;
}

struct WeightGradient {
  Tensor dweight;  // (N, K), undefined without x
  Tensor dbias;    // (N,), undefined if not needed
};

// dweight = dy.T @ x, dbias = column sums of dy; dy (M, N), contiguous, x (M, K) or undefined.
WeightGradient weight_gradient(const Call& call, const Tensor& dy, const Tensor& x, bool need_dbias) {
  WeightGradient out;
  if (!x.defined() || !need_dbias) {
    if (x.defined()) out.dweight = matmul(call, dy.t(), x);
    if (need_dbias) out.dbias = column_sums(call, dy);
    return out;
  }
  const auto separate = [&] {
    out = {matmul(call, dy.t(), x), column_sums(call, dy)};
    return true;
  };
  const auto fused = [&] {
    out = {at::empty({dy.size(1), x.size(1)}, dy.options()), at::empty({dy.size(1)}, dy.options())};
    return product(call, Epilogue::kRowSums, dy.t(), x, out.dweight, out.dbias);
  };
  run_fastest(call, What::kWeightGradient, dy, {dy.size(0), dy.size(1), x.size(1), 0, 0}, {separate, fused});
  return out;
}

struct HiddenGradient {
  Tensor dpreact;           // (M, N)
  WeightGradient of_layer;  // of the MLP's first layer
};

// Back through the MLP's second layer and its GELU, and to the first layer's parameters; dy (M, N2), x (M, K) or
// undefined.
HiddenGradient hidden_gradient(const Call& call, const Tensor& dy, const Tensor& weight2, const Tensor& preact,
                               const Tensor& x, Approximate approximate, bool need_dbias) {
  HiddenGradient out;
  const auto separate = [&] {
    Tensor dbias;
    std::tie(out.dpreact, dbias) = dgelu_dbias(call, matmul(call, dy, weight2), preact, approximate, need_dbias);
    out.of_layer = weight_gradient(call, out.dpreact, x, false);
    if (need_dbias) out.of_layer.dbias = dbias;
    return true;
  };
  if (approximate != Approximate::kTanh) {
    separate();
    return out;
  }
  const auto fused = [&] {
    out.dpreact = at::empty({preact.size(0), preact.size(1)}, preact.options());
    if (!product(call, Epilogue::kDGelu, dy, weight2, out.dpreact, {}, preact.contiguous())) return false;
    out.of_layer = weight_gradient(call, out.dpreact, x, need_dbias);
    return true;
  };
  const auto fused_with_sums = [&] {
    if (!need_dbias) return false;
    out.dpreact = at::empty({preact.size(0), preact.size(1)}, preact.options());
    const Tensor dbias = at::empty({preact.size(1)}, preact.options());
    if (!product(call, Epilogue::kDGeluSums, dy, weight2, out.dpreact, dbias, preact.contiguous())) return false;
    out.of_layer = weight_gradient(call, out.dpreact, x, false);
    out.of_layer.dbias = dbias;
    return true;
  };
  const int64_t K = x.defined() ? x.size(1) : 0;
  run_fastest(call, What::kHidden, dy, {preact.size(0), preact.size(1), dy.size(1), K, need_dbias},
              {fused, separate, fused_with_sums});
  return out;
}

Tensor or_nothing(const Tensor& x, const Tensor& like) { return x.defined() ? x : nothing(like); }

}  // namespace

std::tuple<Tensor, Tensor> linear_gelu_fwd_op(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                              c10::string_view approximate, bool keep_preact) {
  const Call call(x);
  const Hidden out =
      linear_gelu(call, matrix_of(x), weight, or_undefined(bias), approximate_of(approximate), keep_preact);
  return {shaped_as(x, out.act), or_nothing(out.preact, x)};
}

std::tuple<Tensor, Tensor, Tensor> linear_gelu_bwd_op(const Tensor& dy, const std::optional<Tensor>& x,
                                                      const std::optional<Tensor>& weight, const Tensor& preact,
                                                      c10::string_view approximate, bool need_dbias) {
  const Call call(preact);
  const auto [dpreact, dbias] = dgelu_dbias(call, matrix_of(dy), preact, approximate_of(approximate), need_dbias);
  const Tensor dx = weight ? shaped_as(dy, matmul(call, dpreact, *weight)) : nothing(preact);
  const Tensor dweight = x ? matmul(call, dpreact.t(), matrix_of(*x)) : nothing(preact);
  return {dx, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> mlp_fwd_op(const Tensor& x, const Tensor& weight1,
                                              const std::optional<Tensor>& bias1, const Tensor& weight2,
                                              const std::optional<Tensor>& bias2, c10::string_view approximate,
                                              bool keep_preact, bool keep_act) {
  const Call call(x);
  const Hidden hidden =
      linear_gelu(call, matrix_of(x), weight1, or_undefined(bias1), approximate_of(approximate), keep_preact);
  const Tensor y = linear(call, hidden.act, weight2, or_undefined(bias2));
  return {shaped_as(x, y), or_nothing(hidden.preact, x), keep_act ? hidden.act : nothing(x)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_bwd_op(
    const Tensor& dy, const std::optional<Tensor>& x, const std::optional<Tensor>& weight1,
    const std::optional<Tensor>& weight2, const std::optional<Tensor>& preact, const std::optional<Tensor>& act,
    c10::string_view approximate, bool need_dbias1, bool need_dbias2) {
  const Call call(dy);
  const Tensor gradient = matrix_of(dy).contiguous();
  const auto [dweight2, dbias2] = weight_gradient(call, gradient, or_undefined(act), need_dbias2);
  HiddenGradient hidden;
  Tensor dx;
  if (preact) {
    const Tensor inputs = x ? matrix_of(*x) : Tensor();
    hidden = hidden_gradient(call, gradient, *weight2, *preact, inputs, approximate_of(approximate), need_dbias1);
    if (weight1) dx = shaped_as(dy, matmul(call, hidden.dpreact, *weight1));
  }
  return {or_nothing(dx, dy), or_nothing(hidden.of_layer.dweight, dy), or_nothing(hidden.of_layer.dbias, dy),
          or_nothing(dweight2, dy), or_nothing(dbias2, dy)};
}

}  // namespace fusedmlp
