#include "products.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "measure.h"

namespace fusedmlp {
namespace {

// A matrix for cuBLASLt, and the tensor that holds it: the given one, or a contiguous copy.
struct Operand {
  at::Tensor tensor;
  Matrix matrix;
};

Operand operand_of(const at::Tensor& x) {
  const int64_t rows = x.size(0), columns = x.size(1);
  // The stride along a dimension of size 1 says nothing.
  const int64_t row_stride = rows == 1 ? columns : x.stride(0), column_stride = columns == 1 ? rows : x.stride(1);
  if ((x.stride(1) == 1 || columns == 1) && row_stride >= columns) return {x, {x.data_ptr(), row_stride, false}};
  if ((x.stride(0) == 1 || rows == 1) && column_stride >= rows) return {x, {x.data_ptr(), column_stride, true}};
  const at::Tensor copy = x.contiguous();
  return {copy, {copy.data_ptr(), columns, false}};
}

// Whether a getter of PyTorch's context says TF32 for cuBLAS products. It takes and gives enumerators, strings in
// PyTorch 2.9; `allowTF32CuBLAS` gives a warning in some versions, and an error where the newer setting was used.
template <typename Result, typename Backend, typename Op>
bool says_tf32(Result (at::Context::*get)(Backend, Op) const) {
  const at::Context& context = at::globalContext();
  if constexpr (std::is_enum_v<Result>) {
    return (context.*get)(Backend::CUDA, Op::MATMUL) == Result::TF32;
  } else {
    return (context.*get)("cuda", "matmul") == "tf32";
  }
}

bool allows_tf32(Dtype dtype) { return dtype == Dtype::kFloat32 && says_tf32(&at::Context::float32Precision); }

// Times nothing where the user has asked PyTorch for the same algorithms in every run.
bool may_measure() { return !at::globalContext().deterministicAlgorithms(); }

void* pointer_of(const at::Tensor& x) { return x.defined() ? x.data_ptr() : nullptr; }

at::Tensor in_contiguous(const at::Tensor& bias) { return bias.defined() ? bias.contiguous() : bias; }

}  // namespace

bool product(const Call& call, Epilogue epilogue, const at::Tensor& a, const at::Tensor& b, const at::Tensor& d,
             const at::Tensor& bias, const at::Tensor& aux) {
  const Dtype dtype = dtype_of(d);
  const int64_t M = a.size(0), K = a.size(1), N = b.size(1);
  if (M == 0 || K == 0 || N == 0) return false;
  const Operand left = operand_of(a), right = operand_of(b);
  at::Tensor workspace;
  const auto allocate = [&](size_t bytes) {
    workspace = at::empty({static_cast<int64_t>(bytes)}, d.options().dtype(at::kByte));
    return workspace.data_ptr();
  };
  const LtContext context = {at::cuda::getCurrentCUDABlasLtHandle(), call.stream, static_cast<int>(d.get_device()),
                             may_measure(), allocate};
  return run_product({dtype, allows_tf32(dtype), M, N, K, left.matrix, right.matrix, d.data_ptr(), epilogue,
                      pointer_of(bias), pointer_of(aux)},
                     context);
}

at::Tensor matmul(const Call& call, const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor d = at::empty({a.size(0), b.size(1)}, a.options());
  if (product(call, Epilogue::kNone, a, b, d)) return d;
  return at::mm(a, b);
}

at::Tensor linear(const Call& call, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!bias.defined()) return matmul(call, x, weight.t());
  const at::Tensor y = at::empty({x.size(0), weight.size(0)}, x.options());
  if (product(call, Epilogue::kBias, x, weight.t(), y, in_contiguous(bias))) return y;
  return at::addmm(bias, x, weight.t());
}

at::Tensor column_sums(const Call& call, const at::Tensor& x) {
  const int64_t M = x.size(0), N = x.size(1);
  if (x.numel() == 0) return at::zeros({N}, x.options());
  const at::Tensor in = aligned_contiguous(x);
  const Strips strips = strips_of(M, N, dtype_of(x));
  const at::Tensor partial = at::empty({strips.count, N}, x.options().dtype(at::kFloat));
  const at::Tensor sums = at::empty({N}, x.options());
  C10_CUDA_CHECK(strip_sums(dtype_of(x), in.data_ptr(), partial.data_ptr<float>(), M, N, call.stream));
  C10_CUDA_CHECK(add_strips(dtype_of(x), partial.data_ptr<float>(), sums.data_ptr(), strips.count, N, call.stream));
  return sums;
}

std::pair<at::Tensor, at::Tensor> dgelu_dbias(const Call& call, const at::Tensor& dy, const at::Tensor& preact,
                                              Approximate approximate, bool need_dbias) {
  const int64_t M = preact.size(0), N = preact.size(1);
  const at::Tensor dpreact = at::empty({M, N}, preact.options());
  if (preact.numel() == 0) return {dpreact, at::zeros({need_dbias ? N : 0}, preact.options())};
  const at::Tensor sums = at::empty({need_dbias ? N : 0}, preact.options());
  const Dtype dtype = dtype_of(preact);
  const at::Tensor gradient = aligned_contiguous(dy), in = aligned_contiguous(preact);
  if (!need_dbias) {
    C10_CUDA_CHECK(
        gelu_bwd(dtype, approximate, gradient.data_ptr(), in.data_ptr(), dpreact.data_ptr(), M * N, call.stream));
    return {dpreact, sums};
  }
  const Strips strips = strips_of(M, N, dtype);
  const at::Tensor partial = at::empty({strips.count, N}, preact.options().dtype(at::kFloat));
  C10_CUDA_CHECK(dgelu_strip_sums(dtype, approximate, gradient.data_ptr(), in.data_ptr(), dpreact.data_ptr(),
                                  partial.data_ptr<float>(), M, N, call.stream));
  C10_CUDA_CHECK(add_strips(dtype, partial.data_ptr<float>(), sums.data_ptr(), strips.count, N, call.stream));
  return {dpreact, sums};
}

at::Tensor gelu_of(const Call& call, const at::Tensor& preact, Approximate approximate) {
  const at::Tensor act = at::empty_like(preact);
  if (preact.numel() == 0) return act;
  C10_CUDA_CHECK(gelu_fwd(dtype_of(preact), approximate, preact.data_ptr(), act.data_ptr(), act.numel(), call.stream));
  return act;
}

void run_fastest(const Call& call, What what, const at::Tensor& like, std::array<int64_t, 5> problem,
                 const std::vector<std::function<bool()>>& ways) {
  using Choices = Answers<size_t, 9>;
  static Choices choices;
  Choices::Key key = {static_cast<int64_t>(what), like.get_device(), static_cast<int64_t>(like.scalar_type()),
                      allows_tf32(dtype_of(like))};
  std::copy(problem.begin(), problem.end(), key.begin() + 4);
  std::optional<size_t> choice;
  if (may_measure()) {
    choice = choices.find(key);
    if (!choice && !choices.is_full() && !is_capturing(call.stream)) {
      choice = fastest(call.stream, ways.size(), [&](size_t i) { return ways[i](); });
      if (choice) choice = choices.keep(key, *choice);
    }
  }
  // The remembered way comes first; another address of the same problem can be one that it does not take.
  if (choice && ways[*choice]()) return;
  for (const auto& way : ways) {
    if (way()) return;
  }
  TORCH_INTERNAL_ASSERT(false, "no way to compute it");
}

}  // namespace fusedmlp
