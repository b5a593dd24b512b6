// The launchers under C names, for Python.
#include <algorithm>
#include <iterator>

#include "kernels.h"
#include "softmax_plan.h"

using namespace fusedmlp;

extern "C" {

int run_gelu_fwd(int dtype, int approximate, const void* x, void* y, int64_t n) {
  return gelu_fwd(Dtype(dtype), Approximate(approximate), x, y, n, nullptr);
}

int run_gelu_bwd(int dtype, int approximate, const void* dy, const void* x, void* dx, int64_t n) {
  return gelu_bwd(Dtype(dtype), Approximate(approximate), dy, x, dx, n, nullptr);
}

int64_t strips(int dtype, int64_t M, int64_t N) { return strips_of(M, N, Dtype(dtype)).count; }

// approximate < 0: column sums of dy alone.
int run_column_sums(int dtype, int approximate, const void* dy, const void* preact, void* dpreact, float* partial,
                    void* out, int64_t M, int64_t N) {
  const cudaError_t error = approximate < 0 ? strip_sums(Dtype(dtype), dy, partial, M, N, nullptr)
                                            : dgelu_strip_sums(Dtype(dtype), Approximate(approximate), dy, preact,
                                                               dpreact, partial, M, N, nullptr);
  return error != cudaSuccess ? error
                              : add_strips(Dtype(dtype), partial, out, strips_of(M, N, Dtype(dtype)).count, N, nullptr);
}

// From now on rows of these tensors, `bytes` from the first element to the last, are all that may be read ahead of.
void watch_prefetches(int count, const void* const* tensors, const int64_t* bytes) {
  emulation::readable.clear();
  emulation::prefetched.clear();
  for (int i = 0; i < count; ++i) {
    const auto begin = reinterpret_cast<uintptr_t>(tensors[i]);
    emulation::readable.emplace_back(begin, begin + bytes[i]);
  }
}

// Whether the line of 128 bytes that `address` is in has been.
int was_prefetched(const void* address) {
  return static_cast<int>(emulation::prefetched.count(reinterpret_cast<uintptr_t>(address) / 128));
}

int run_softmax_fwd(int dtype, const void* x, int64_t stride_x, void* y, int64_t M, int64_t N, int max_cluster) {
  return softmax_fwd(Dtype(dtype), x, stride_x, y, M, N, max_cluster, nullptr);
}

int run_softmax_bwd(int dtype, const void* dy, int64_t stride_dy, const void* y, int64_t stride_y, void* dx, int64_t M,
                    int64_t N, int max_cluster) {
  return softmax_bwd(Dtype(dtype), dy, stride_dy, y, stride_y, dx, M, N, max_cluster, nullptr);
}

// The largest cluster that is found where the hardware has such of `largest` blocks.
int find_max_cluster(int largest) {
  int size = 0;
  emulation::largest_cluster = largest;
  const cudaError_t error = max_cluster_size(&size);
  emulation::largest_cluster = 16;
  return error == cudaSuccess ? size : -1;
}

// vectors of a thread, blocks, vectors of a warp, bytes resident on a multiprocessor.
void plan_slices(int64_t row_vectors, int operands, int max_cluster, int64_t* out) {
  const SlicePlan plan = slice_plan(row_vectors, operands, max_cluster);
  const int64_t numbers[] = {plan.vectors, plan.cluster, plan.per_warp, resident_bytes(plan, operands)};
  std::copy(std::begin(numbers), std::end(numbers), out);
}

}  // extern "C"
