// Launchers of the hand-written kernels, on raw pointers, free of PyTorch: so each .cu file compiles in seconds.
//
// Every launcher enqueues on `stream` of the current device, waits for nothing, allocates nothing, and returns the
// launch's error. M rows, N columns. All pointers to tensors are aligned to 16 bytes unless said otherwise.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace fusedmlp {

enum class Dtype { kFloat32, kFloat16, kBFloat16 };
enum class Approximate { kNone, kTanh };

constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// y = gelu(x), n elements.
cudaError_t gelu_fwd(Dtype dtype, Approximate approximate, const void* x, void* y, int64_t n, cudaStream_t stream);

// dx = dy * gelu'(x), n elements.
cudaError_t gelu_bwd(Dtype dtype, Approximate approximate, const void* dy, const void* x, void* dx, int64_t n,
                     cudaStream_t stream);

// A sum over M rows is made of sums over strips of rows, `partial` (strips, N) in fp32, which are then added from first
// to last: no atomics, so the same inputs give the same bits.
struct Strips {
  int64_t rows;   // of one strip
  int64_t count;  // of all strips
};
Strips strips_of(int64_t M, int64_t N, Dtype dtype);

// dpreact (M, N) = dy * gelu'(preact) and the strips' column sums of dpreact; all contiguous.
cudaError_t dgelu_strip_sums(Dtype dtype, Approximate approximate, const void* dy, const void* preact, void* dpreact,
                             float* partial, int64_t M, int64_t N, cudaStream_t stream);

// The strips' column sums of x (M, N), contiguous.
cudaError_t strip_sums(Dtype dtype, const void* x, float* partial, int64_t M, int64_t N, cudaStream_t stream);

// out (N,) = column sums of partial (strips, N), rounded to dtype.
cudaError_t add_strips(Dtype dtype, const float* partial, void* out, int64_t strips, int64_t N, cudaStream_t stream);

// y = softmax of each row of x. y (M, N) is contiguous; x has unit column stride, `stride_x` elements from row to row,
// and every row of x lies as far from a multiple of 16 bytes as the same row of y. `max_cluster`: see softmax_plan.h.
cudaError_t softmax_fwd(Dtype dtype, const void* x, int64_t stride_x, void* y, int64_t M, int64_t N, int max_cluster,
                        cudaStream_t stream);

// dx = y * (dy - sum(y * dy)) for each row; dx is contiguous, dy and y are as x above.
cudaError_t softmax_bwd(Dtype dtype, const void* dy, int64_t stride_dy, const void* y, int64_t stride_y, void* dx,
                        int64_t M, int64_t N, int max_cluster, cudaStream_t stream);

// The largest cluster of thread blocks that the softmax kernels can have on the current device; 1: no clusters.
cudaError_t max_cluster_size(int* size);

}  // namespace fusedmlp
