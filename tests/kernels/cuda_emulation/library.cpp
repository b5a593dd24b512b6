// The launchers under C names, for Python.
#include "kernels.h"

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

int run_softmax_fwd(int dtype, const void* x, int64_t stride_x, void* y, int64_t M, int64_t N, int max_cluster) {
  return softmax_fwd(Dtype(dtype), x, stride_x, y, M, N, max_cluster, nullptr);
}

int run_softmax_bwd(int dtype, const void* dy, int64_t stride_dy, const void* y, int64_t stride_y, void* dx, int64_t M,
                    int64_t N, int max_cluster) {
  return softmax_bwd(Dtype(dtype), dy, stride_dy, y, stride_y, dx, M, N, max_cluster, nullptr);
}

}  // extern "C"
