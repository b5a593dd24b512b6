// csrc/gemm.cpp with PyTorch's CPU products in the place of cuBLASLt: what each epilogue means, line by line.
#include "gemm.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>

namespace fusedmlp {
namespace {

at::ScalarType scalar_type(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? at::kFloat : dtype == Dtype::kFloat16 ? at::kHalf : at::kBFloat16;
}

at::Tensor matrix(const void* data, int64_t rows, int64_t columns, int64_t ld, Dtype dtype) {
  return at::from_blob(const_cast<void*>(data), {rows, columns}, {ld, 1}, at::TensorOptions(scalar_type(dtype)));
}

at::Tensor operand(const Matrix& m, int64_t rows, int64_t columns, Dtype dtype) {
  return m.transposed ? matrix(m.data, columns, rows, m.ld, dtype).t() : matrix(m.data, rows, columns, m.ld, dtype);
}

}  // namespace

bool run_product(const Product& p, const LtContext&) {
  if (!fits(p)) return false;
  const at::Tensor a = operand(p.a, p.M, p.K, p.dtype).to(at::kFloat),
                   b = operand(p.b, p.K, p.N, p.dtype).to(at::kFloat);
  const at::Tensor d = matrix(p.d, p.M, p.N, p.N, p.dtype);
  const at::Tensor aux = matrix(p.aux, p.M, p.N, p.N, p.dtype);
  const auto vector = [&](int64_t n) { return matrix(p.bias, 1, n, n, p.dtype)[0]; };
  at::Tensor result = at::mm(a, b);
  switch (p.epilogue) {
    case Epilogue::kNone:
      break;
    case Epilogue::kBias:
      result = result.add(vector(p.N));
      break;
    case Epilogue::kGelu:
      result = at::gelu(result, "tanh");
      break;
    case Epilogue::kGeluBias:
      result = at::gelu(result.add(vector(p.N)), "tanh");
      break;
    case Epilogue::kGeluAux:
      aux.copy_(result);
      result = at::gelu(result, "tanh");
      break;
    case Epilogue::kGeluAuxBias:
      result = result.add(vector(p.N));
      aux.copy_(result);
      result = at::gelu(result, "tanh");
      break;
    case Epilogue::kDGelu:
      result = at::gelu_backward(result, aux.to(at::kFloat), "tanh");
      break;
    case Epilogue::kDGeluSums:
      result = at::gelu_backward(result, aux.to(at::kFloat), "tanh");
      vector(p.N).copy_(result.sum(0));
      break;
    case Epilogue::kRowSums:
      vector(p.M).copy_(a.sum(1));
      break;
  }
  d.copy_(result);
  return true;
}

}  // namespace fusedmlp
