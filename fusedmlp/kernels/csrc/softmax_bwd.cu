// dx = y * (dy - sum(y * dy)) for each row.
#include "softmax_bwd.cuh"
#include "softmax_bwd_cluster.cuh"
#include "softmax_launch.cuh"

namespace fusedmlp {
namespace {

// `lanes` neighbouring threads of one warp read one row of dy and y and write dx.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kNarrowThreads)
    softmax_bwd_lanes_kernel(const T* __restrict__ dy, int64_t stride_dy, const T* __restrict__ y, int64_t stride_y,
                             T* __restrict__ dx, int64_t M, int64_t N, int lanes) {
  const int lane_bits = log2_of(lanes);
  const int64_t rows = blockDim.x >> lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t row = blockIdx.x * rows + (threadIdx.x >> lane_bits);
  // Lanes beyond the last row take part in the shuffles: they compute it too, and write nothing.
  const int64_t m = min(row, M - 1);
  const auto span = span_of<int>(dx + m * N, N);
  Packed packed_dy[kVectors], packed_y[kVectors];
  load_vectors<T>(dy + m * stride_dy, span, lane, lanes, 0.0f, packed_dy);
  load_vectors<T>(y + m * stride_y, span, lane, lanes, 0.0f, packed_y);
  const float sum = over_lanes(dot<T>(packed_dy, packed_y), lanes, Sum{});
  if (row < M) store_dx<T>(dx + m * N, span, lane, lanes, sum, packed_dy, packed_y);
}

// One block reads one row of dy and y, keeps them in registers, and writes dx.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostThreads)
    softmax_bwd_row_kernel(const T* __restrict__ dy, int64_t stride_dy, const T* __restrict__ y, int64_t stride_y,
                           T* __restrict__ dx, int64_t N) {
  const int64_t m = blockIdx.x;
  const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  const auto span = span_of<int>(dx + m * N, N);
  Packed packed_dy[kVectors], packed_y[kVectors];
  load_vectors<T>(dy + m * stride_dy, span, first, step, 0.0f, packed_dy);
  load_vectors<T>(y + m * stride_y, span, first, step, 0.0f, packed_y);
  const float of_warp = over_lanes(dot<T>(packed_dy, packed_y), kWarp, Sum{});
  const float sum = over_row(of_warp, 0.0f, Sum{});
  keep_packed_until(sum, packed_dy);
  keep_packed_until(sum, packed_y);
  store_dx<T>(dx + m * N, span, first, step, sum, packed_dy, packed_y);
}

// One block reads one row of dy and y twice, for the sum and for dx.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostThreads)
    softmax_bwd_twice_kernel(const T* __restrict__ dy, int64_t stride_dy, const T* __restrict__ y, int64_t stride_y,
                             T* __restrict__ dx, int64_t N) {
  const int64_t m = blockIdx.x;
  const int64_t step = blockDim.x;
  const auto span = span_of<int64_t>(dx + m * N, N);
  Packed packed_dy[kVectors], packed_y[kVectors];
  float of_thread = 0.0f;
  for (int64_t first = threadIdx.x; first < span.vectors; first += kVectors * step) {
    load_vectors<T>(dy + m * stride_dy, span, first, step, 0.0f, packed_dy);
    load_vectors<T>(y + m * stride_y, span, first, step, 0.0f, packed_y);
    of_thread += dot<T>(packed_dy, packed_y);
  }
  const float sum = over_row(over_lanes(of_thread, kWarp, Sum{}), 0.0f, Sum{});
  for (int64_t first = threadIdx.x; first < span.vectors; first += kVectors * step) {
    load_vectors<T>(dy + m * stride_dy, span, first, step, 0.0f, packed_dy);
    load_vectors<T>(y + m * stride_y, span, first, step, 0.0f, packed_y);
    store_dx<T>(dx + m * N, span, first, step, sum, packed_dy, packed_y);
  }
}

// A thread holds 4 vectors of dy and 4 of y, as they lie in memory: 32 registers.
constexpr int kMost = 4;

template <typename T>
cudaError_t run(const T* dy, int64_t stride_dy, const T* y, int64_t stride_y, T* dx, int64_t M, int64_t N,
                int max_cluster, cudaStream_t stream) {
  const int64_t row_vectors = most_row_vectors(M, N, dx);
  const SoftmaxPlan plan = softmax_plan(row_vectors, kMost, max_cluster);
  switch (plan.spread) {
    case Spread::kLanes:
      return with_vectors<kMost>(plan.vectors, [&](auto vectors) {
        const Grid grid = {ceil_div(M, plan.threads / plan.lanes), plan.threads};
        return launch(softmax_bwd_lanes_kernel<T, decltype(vectors)::value>, grid, stream, dy, stride_dy, y, stride_y,
                      dx, M, N, plan.lanes);
      });
    case Spread::kBlock:
      return launch_rows<float>(softmax_bwd_row_kernel<T, kMost>, plan, M, stream, dy, stride_dy, y, stride_y,
                                dx, N);
    case Spread::kCluster:
      return launch_slices(softmax_bwd_cluster_kernel<T, kMostSliceVectors / 2>,
                           softmax_bwd_cluster_kernel<T, kMostSliceVectors>, slice_plan(row_vectors, 2, max_cluster), M,
                           stream, dy, stride_dy, y, stride_y, dx, M, N);
    case Spread::kTwice:
      return launch_rows<float>(softmax_bwd_twice_kernel<T, kMost>, plan, M, stream, dy, stride_dy, y, stride_y, dx, N);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t softmax_bwd(Dtype dtype, const void* dy, int64_t stride_dy, const void* y, int64_t stride_y, void* dx,
                        int64_t M, int64_t N, int max_cluster, cudaStream_t stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return run(static_cast<const T*>(dy), stride_dy, static_cast<const T*>(y), stride_y, static_cast<T*>(dx), M, N,
               max_cluster, stream);
  });
}

}  // namespace fusedmlp
