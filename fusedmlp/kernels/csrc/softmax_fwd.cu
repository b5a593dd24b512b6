// y = exp(x - max(x)) / sum(exp(x - max(x))) for each row.
#include "softmax_fwd_cluster.cuh"
#include "softmax_launch.cuh"

namespace fusedmlp {
namespace {

template <typename T, int kVectors>
__device__ __forceinline__ void unpack_all(const Packed (&packed)[kVectors], float (&values)[kVectors * kVec<T>]) {
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    float vector[kVec<T>];
    unpack<T>(packed[r], vector);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) values[r * kVec<T> + i] = vector[i];
  }
}

// kFull: no vector is partial, and none beyond the row.
template <typename T, int kVectors, bool kFull = false, typename Index>
__device__ __forceinline__ void store_scaled(T* row, const Span<Index>& span, Index first, Index step, float scale,
                                             const float (&values)[kVectors * kVec<T>]) {
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    float vector[kVec<T>];
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) vector[i] = values[r * kVec<T> + i] * scale;
    if constexpr (kFull) {
      store16(row + (first + r * step) * kVec<T>, pack<T>(vector));
    } else {
      store_vector(row, span, first + r * step, vector);
    }
  }
}

// A thread holds 32 values in registers, or twice as many of 16 bits where a row would fill more than a block.
template <typename T>
constexpr int kMostVectors = 32 / kVec<T>;
constexpr int kMostWide = 8;

// Of the kernel below. Where threads need many registers, half a block is a place that is free again sooner.
template <typename T, int kVectors>
constexpr int kLanesThreads = kVectors == kMostVectors<T> ? kNarrowThreads / 2 : kNarrowThreads;

// `lanes` neighbouring threads of one warp read one row of x and write its softmax. With kFull, the row is exactly what
// they can hold: no element has to be asked whether it is there. kLanes: `lanes`, or 0 where it is known only at run
// time.
template <typename T, int kVectors, bool kFull, int kLanes>
__global__ void __launch_bounds__(kLanesThreads<T, kVectors>)
    softmax_fwd_lanes_kernel(const T* __restrict__ x, int64_t stride_x, T* __restrict__ y, int64_t M, int64_t N,
                             int lanes) {
  if constexpr (kLanes != 0) lanes = kLanes;
  if constexpr (kFull) N = lanes * kVectors * kVec<T>;
  const int lane_bits = log2_of(lanes);
  const int64_t rows = blockDim.x >> lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t row = blockIdx.x * rows + (threadIdx.x >> lane_bits);
  // Lanes beyond the last row take part in the shuffles: they compute it too, and write nothing.
  const int64_t m = min(row, M - 1);
  const auto span = kFull ? Span<int>{0, static_cast<int>(N), lanes * kVectors, true} : span_of<int>(y + m * N, N);
  Packed packed[kVectors];
  load_vectors<T>(x + m * stride_x, span, lane, lanes, -INFINITY, packed);
  const float max = over_lanes(largest<T>(packed), lanes, Max{});
  float values[kVectors * kVec<T>];
  unpack_all<T>(packed, values);
  const float sum = over_lanes(exponentials(max, values), lanes, Sum{});
  if (row < M) store_scaled<T, kVectors, kFull>(y + m * N, span, lane, lanes, 1.0f / sum, values);
}

// Threads of a block that keeps a row. Twice as many values of 16 bits need more registers than 1024 threads can have.
template <typename T>
constexpr int kRowThreads = sizeof(T) == 2 ? kUsualThreads : kMostThreads;

// One block reads one row of x, keeps it in registers, and writes its softmax. The row is kept as it came: in 16 bits
// it leaves room for twice as many bytes under way, and the second e^x costs less than waiting.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kRowThreads<T>)
    softmax_fwd_row_kernel(const T* __restrict__ x, int64_t stride_x, T* __restrict__ y, int64_t N) {
  const int64_t m = blockIdx.x;
  const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  const auto span = span_of<int>(y + m * N, N);
  Packed packed[kVectors];
  load_vectors<T>(x + m * stride_x, span, first, step, -INFINITY, packed);
  const float warp_max = over_lanes(largest<T>(packed), kWarp, Max{});
  keep_packed_until(warp_max, packed);
  const float warp_sum = over_lanes(sum_of_exponentials<T>(warp_max, packed), kWarp, Sum{});
  const MaxSum of_row = over_row(MaxSum{warp_max, warp_sum}, nothing(), Combine{});
  keep_packed_until(of_row.sum, packed);
  const float scale = 1.0f / of_row.sum;
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    store_softmax(y + m * N, span, first + r * step, of_row.max, scale, packed[r]);
  }
}

// One block reads one row of x twice, for (max, sum) and for the softmax that it writes.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostThreads)
    softmax_fwd_twice_kernel(const T* __restrict__ x, int64_t stride_x, T* __restrict__ y, int64_t N) {
  const int64_t m = blockIdx.x;
  const int64_t step = blockDim.x;
  const auto span = span_of<int64_t>(y + m * N, N);
  Packed packed[kVectors];
  float values[kVectors * kVec<T>];
  MaxSum of_thread = nothing();
  for (int64_t first = threadIdx.x; first < span.vectors; first += kVectors * step) {
    load_vectors<T>(x + m * stride_x, span, first, step, -INFINITY, packed);
    const float max = largest<T>(packed);
    unpack_all<T>(packed, values);
    of_thread = Combine{}(of_thread, MaxSum{max, exponentials(max, values)});
  }
  const MaxSum of_row = over_row(over_lanes(of_thread, kWarp, Combine{}), nothing(), Combine{});
  for (int64_t first = threadIdx.x; first < span.vectors; first += kVectors * step) {
    load_vectors<T>(x + m * stride_x, span, first, step, -INFINITY, packed);
    unpack_all<T>(packed, values);
    exponentials(of_row.max, values);
    store_scaled<T, kVectors>(y + m * N, span, first, step, 1.0f / of_row.sum, values);
  }
}

template <typename T>
cudaError_t run_lanes(const T* x, int64_t stride_x, T* y, int64_t M, int64_t N, int64_t row_vectors,
                      const SoftmaxPlan& plan, cudaStream_t stream) {
  return with_vectors<kMostVectors<T>>(plan.vectors, [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    const bool full = row_vectors == plan.lanes * kVectors && row_vectors * kVec<T> == N;
    auto kernel = softmax_fwd_lanes_kernel<T, kVectors, false, 0>;
    if (full && plan.lanes == kWarp) {
      kernel = softmax_fwd_lanes_kernel<T, kVectors, true, kWarp>;
    } else if constexpr (kVectors == 1) {
      if (full) kernel = softmax_fwd_lanes_kernel<T, 1, true, 0>;
    }
    constexpr int kThreads = kLanesThreads<T, kVectors>;
    const Grid grid = {ceil_div(M, kThreads / plan.lanes), kThreads};
    return launch(kernel, grid, stream, x, stride_x, y, M, N, plan.lanes);
  });
}

template <typename T>
cudaError_t run(const T* x, int64_t stride_x, T* y, int64_t M, int64_t N, int max_cluster, cudaStream_t stream) {
  constexpr int kMost = kMostVectors<T>;
  const int64_t row_vectors = most_row_vectors(M, N, y);
  const int most = row_vectors <= int64_t{kUsualThreads} * kMost ? kMost : kMostWide;
  const SoftmaxPlan plan = softmax_plan(row_vectors, most, max_cluster, kRowThreads<T>);
  switch (plan.spread) {
    case Spread::kLanes:
      return run_lanes(x, stride_x, y, M, N, row_vectors, plan, stream);
    case Spread::kBlock:
      if (plan.vectors == kMost) {
        return launch_rows<MaxSum>(softmax_fwd_row_kernel<T, kMost>, plan, M, stream, x, stride_x, y, N);
      }
      return launch_rows<MaxSum>(softmax_fwd_row_kernel<T, kMostWide>, plan, M, stream, x, stride_x, y, N);
    case Spread::kCluster:
      return launch_slices(softmax_fwd_cluster_kernel<T, kMostSliceVectors / 2>,
                           softmax_fwd_cluster_kernel<T, kMostSliceVectors>, slice_plan(row_vectors, 1, max_cluster), M,
                           stream, x, stride_x, y, M, N);
    case Spread::kTwice:
      return launch_rows<MaxSum>(softmax_fwd_twice_kernel<T, 4>, plan, M, stream, x, stride_x, y, N);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t softmax_fwd(Dtype dtype, const void* x, int64_t stride_x, void* y, int64_t M, int64_t N, int max_cluster,
                        cudaStream_t stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return run(static_cast<const T*>(x), stride_x, static_cast<T*>(y), M, N, max_cluster, stream);
  });
}

cudaError_t max_cluster_size(int* size) {
  *size = 1;
  int device = 0, has_clusters = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&has_clusters, cudaDevAttrClusterLaunch, device);
  if (error != cudaSuccess || !has_clusters) return error;
  // Threads and shared memory are the same for every dtype, forward and backward, and are what limits a cluster.
  return largest_cluster(softmax_fwd_cluster_kernel<__nv_bfloat16, kMostSliceVectors>, kSliceThreads, kMostSliceBytes,
                         size);
}

}  // namespace fusedmlp
