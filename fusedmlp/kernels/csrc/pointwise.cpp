// The operators of gelu and softmax: tensors of any layout in, a launch, a tensor out.
#include "operators.h"

#include <map>
#include <mutex>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "tensors.h"

namespace fusedmlp {
namespace {

// x itself if it lies in memory as `like` does, which has no gaps; else a copy that does.
at::Tensor laid_out_as(const at::Tensor& like, const at::Tensor& x) {
  if (x.strides() == like.strides() && is_aligned(x)) return x;
  return at::empty_like(like).copy_(x);
}

// x as (M, N), N along `dim`, with unit column stride: a view where its layout allows one, else a copy.
at::Tensor rows_of(const at::Tensor& x, int64_t dim) {
  if (x.dim() == 0) return x.view({1, 1});
  const at::Tensor moved = x.movedim(dim, -1);
  const at::Tensor rows = moved.reshape({-1, moved.size(-1)});
  return rows.size(1) == 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

// Rows to write the result into: those of `out` itself where they are contiguous.
at::Tensor rows_to_fill(const at::Tensor& out, int64_t dim) {
  if (out.dim() == 0) return out.view({1, 1});
  const at::Tensor moved = out.movedim(dim, -1);
  const int64_t N = moved.size(-1);
  return moved.is_contiguous() ? moved.view({-1, N}) : at::empty({out.numel() / N, N}, out.options());
}

void copy_if_apart(const at::Tensor& out, const at::Tensor& rows, int64_t dim) {
  if (rows.data_ptr() == out.data_ptr()) return;
  const at::Tensor moved = out.movedim(dim, -1);
  moved.copy_(rows.view(moved.sizes()));
}

// rows, or a copy of them, of which each begins as far from a multiple of 16 bytes as that of `out`, which is
// contiguous.
at::Tensor in_step_with(const at::Tensor& out, const at::Tensor& rows) {
  const int64_t size = rows.element_size();
  const bool bases =
      (reinterpret_cast<intptr_t>(rows.data_ptr()) - reinterpret_cast<intptr_t>(out.data_ptr())) % 16 == 0;
  const bool steps = rows.size(0) == 1 || (rows.stride(0) - out.stride(0)) * size % 16 == 0;
  return bases && steps ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

int max_cluster(const at::Tensor& x) {
  static std::mutex mutex;
  static std::map<int64_t, int> sizes;
  const std::lock_guard<std::mutex> lock(mutex);
  int& size = sizes[x.get_device()];
  if (size == 0) C10_CUDA_CHECK(max_cluster_size(&size));
  return size;
}

}  // namespace

at::Tensor gelu_fwd_op(const at::Tensor& x, c10::string_view approximate) {
  const Call call(x);
  const at::Tensor y = at::empty_like(x);
  if (x.numel() == 0) return y;
  const at::Tensor in = laid_out_as(y, x);
  C10_CUDA_CHECK(
      gelu_fwd(dtype_of(x), approximate_of(approximate), in.data_ptr(), y.data_ptr(), y.numel(), call.stream));
  return y;
}

at::Tensor gelu_bwd_op(const at::Tensor& dy, const at::Tensor& x, c10::string_view approximate) {
  const Call call(x);
  const at::Tensor dx = at::empty_like(x);
  if (x.numel() == 0) return dx;
  const at::Tensor gradient = laid_out_as(dx, dy), in = laid_out_as(dx, x);
  C10_CUDA_CHECK(gelu_bwd(dtype_of(x), approximate_of(approximate), gradient.data_ptr(), in.data_ptr(), dx.data_ptr(),
                          dx.numel(), call.stream));
  return dx;
}

at::Tensor softmax_fwd_op(const at::Tensor& x, int64_t dim) {
  const Call call(x);
  const at::Tensor y = at::empty_like(x);
  if (x.numel() == 0) return y;
  const at::Tensor y_rows = rows_to_fill(y, dim);
  const at::Tensor x_rows = in_step_with(y_rows, rows_of(x, dim));
  C10_CUDA_CHECK(softmax_fwd(dtype_of(x), x_rows.data_ptr(), x_rows.stride(0), y_rows.data_ptr(), y_rows.size(0),
                             y_rows.size(1), max_cluster(x), call.stream));
  copy_if_apart(y, y_rows, dim);
  return y;
}

at::Tensor softmax_bwd_op(const at::Tensor& dy, const at::Tensor& y, int64_t dim) {
  const Call call(y);
  const at::Tensor dx = at::empty_like(y);
  if (y.numel() == 0) return dx;
  const at::Tensor dx_rows = rows_to_fill(dx, dim);
  const at::Tensor dy_rows = in_step_with(dx_rows, rows_of(dy, dim));
  const at::Tensor y_rows = in_step_with(dx_rows, rows_of(y, dim));
  C10_CUDA_CHECK(softmax_bwd(dtype_of(y), dy_rows.data_ptr(), dy_rows.stride(0), y_rows.data_ptr(), y_rows.stride(0),
                             dx_rows.data_ptr(), dx_rows.size(0), dx_rows.size(1), max_cluster(y), call.stream));
  copy_if_apart(dx, dx_rows, dim);
  return dx;
}

}  // namespace fusedmlp
