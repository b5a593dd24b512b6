// y = exp(x - max(x)) / sum(exp(x - max(x))) for each row.
//
// Each group of threads computes (max, sum of exponentials relative to that max); two such pairs combine into one. A
// group that has seen nothing but -inf counts relative to 0. A row of -inf, or one with +inf or NaN, becomes NaN by
// itself (0 * (1 / 0), inf - inf), as in torch.
#include "softmax_launch.cuh"

namespace fusedmlp {

struct MaxSum {
  float max;
  float sum;
};

__device__ __forceinline__ MaxSum lane_xor(MaxSum value, int mask) {
  return {lane_xor(value.max, mask), lane_xor(value.sum, mask)};
}

namespace {

constexpr float kLog2E = 1.4426950408889634f;

// e^(from - to), 1 for two infinities of the same sign.
__device__ __forceinline__ float rescale(float from, float to) {
  return from == to ? 1.0f : exp2_approx((from - to) * kLog2E);
}

struct Combine {
  __device__ __forceinline__ MaxSum operator()(MaxSum a, MaxSum b) const {
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum * rescale(a.max, max) + b.sum * rescale(b.max, max)};
  }
};

struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

__device__ __forceinline__ MaxSum nothing() { return {-INFINITY, 0.0f}; }

// e^(x - max) in place of each value, and their sum.
template <int kCount>
__device__ __forceinline__ float exponentials(float max, float (&values)[kCount]) {
  const float base = max == -INFINITY ? 0.0f : max;
  float sum = 0.0f;
#pragma unroll
  for (float& value : values) {
    value = exp2_approx((value - base) * kLog2E);
    sum += value;
  }
  return sum;
}

template <int kCount>
__device__ __forceinline__ float largest(const float (&values)[kCount]) {
  float max = values[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) max = fmaxf(max, values[i]);
  // fmaxf drops a NaN, unless there is nothing else.
  return fmaxf(max, -INFINITY);
}

template <typename T, int kVectors, typename Index>
__device__ __forceinline__ void load_values(const T* row, const Span<Index>& span, Index first, Index step,
                                            float (&values)[kVectors * kVec<T>]) {
  Packed packed[kVectors];
  load_vectors<T>(row, span, first, step, -INFINITY, packed);
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    float vector[kVec<T>];
    unpack<T>(packed[r], vector);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) values[r * kVec<T> + i] = vector[i];
  }
}

template <typename T, int kVectors, typename Index>
__device__ __forceinline__ void store_scaled(T* row, const Span<Index>& span, Index first, Index step, float scale,
                                             const float (&values)[kVectors * kVec<T>]) {
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    float vector[kVec<T>];
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) vector[i] = values[r * kVec<T> + i] * scale;
    store_vector(row, span, first + r * step, vector);
  }
}

// `lanes` neighbouring threads of one warp read one row of x and write its softmax.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kNarrowThreads)
    softmax_fwd_lanes_kernel(const T* __restrict__ x, int64_t stride_x, T* __restrict__ y, int64_t M, int64_t N,
                             int lanes) {
  const int64_t rows = blockDim.x / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int64_t row = blockIdx.x * rows + threadIdx.x / lanes;
  // Lanes beyond the last row take part in the shuffles: they compute it too, and write nothing.
  const int64_t m = min(row, M - 1);
  const auto span = span_of<int>(y + m * N, N);
  float values[kVectors * kVec<T>];
  load_values<T, kVectors>(x + m * stride_x, span, lane, lanes, values);
  const float max = over_lanes(largest(values), lanes, Max{});
  const float sum = over_lanes(exponentials(max, values), lanes, Sum{});
  if (row < M) store_scaled<T, kVectors>(y + m * N, span, lane, lanes, 1.0f / sum, values);
}

template <typename T, int kVectors>
__device__ __forceinline__ float largest(const Packed (&packed)[kVectors]) {
  float max = -INFINITY;
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    float values[kVec<T>];
    unpack<T>(packed[r], values);
    max = fmaxf(max, largest(values));
  }
  return max;
}

// Sum of e^(x - max).
template <typename T, int kVectors>
__device__ __forceinline__ float sum_of_exponentials(float max, const Packed (&packed)[kVectors]) {
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    float values[kVec<T>];
    unpack<T>(packed[r], values);
    sum += exponentials(max, values);
  }
  return sum;
}

// Threads of a block that keeps a row. Twice as many values of 16 bits need more registers than 1024 threads can have.
template <typename T>
constexpr int kRowThreads = sizeof(T) == 2 ? kUsualThreads : kMostThreads;

// One block, or a cluster of blocks, reads one row of x, keeps it in registers, and writes its softmax. The row is kept
// as it came: in 16 bits it leaves room for twice as many bytes under way, and the second e^x costs less than waiting.
template <typename T, int kVectors, bool kCluster>
__global__ void __launch_bounds__(kRowThreads<T>)
    softmax_fwd_row_kernel(const T* __restrict__ x, int64_t stride_x, T* __restrict__ y, int64_t N) {
  if constexpr (kCluster) cluster_arrive();
  const int blocks = kCluster ? cluster_size() : 1;
  const int rank = kCluster ? cluster_rank() : 0;
  const int64_t m = blockIdx.x / blocks;
  const int first = rank * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  const int step = blocks * static_cast<int>(blockDim.x);
  const auto span = span_of<int>(y + m * N, N);
  Packed packed[kVectors];
  load_vectors<T>(x + m * stride_x, span, first, step, -INFINITY, packed);
  const float warp_max = over_lanes(largest<T>(packed), kWarp, Max{});
  keep_packed_until(warp_max, packed);
  const float warp_sum = over_lanes(sum_of_exponentials<T>(warp_max, packed), kWarp, Sum{});
  const MaxSum of_row = over_row<kCluster>(MaxSum{warp_max, warp_sum}, nothing(), Combine{});
  keep_packed_until(of_row.sum, packed);
  const float scale = 1.0f / of_row.sum;
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    float values[kVec<T>];
    unpack<T>(packed[r], values);
    exponentials(of_row.max, values);
#pragma unroll
    for (float& value : values) value *= scale;
    store_vector(y + m * N, span, first + r * step, values);
  }
}

// One block reads one row of x twice, for (max, sum) and for the softmax that it writes.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostThreads)
    softmax_fwd_twice_kernel(const T* __restrict__ x, int64_t stride_x, T* __restrict__ y, int64_t N) {
  const int64_t m = blockIdx.x;
  const int64_t step = blockDim.x;
  const auto span = span_of<int64_t>(y + m * N, N);
  float values[kVectors * kVec<T>];
  MaxSum of_thread = nothing();
  for (int64_t first = threadIdx.x; first < span.vectors; first += kVectors * step) {
    load_values<T, kVectors>(x + m * stride_x, span, first, step, values);
    const float max = largest(values);
    of_thread = Combine{}(of_thread, MaxSum{max, exponentials(max, values)});
  }
  const MaxSum of_row = over_row<false>(over_lanes(of_thread, kWarp, Combine{}), nothing(), Combine{});
  for (int64_t first = threadIdx.x; first < span.vectors; first += kVectors * step) {
    load_values<T, kVectors>(x + m * stride_x, span, first, step, values);
    exponentials(of_row.max, values);
    store_scaled<T, kVectors>(y + m * N, span, first, step, 1.0f / of_row.sum, values);
  }
}

// A thread holds 32 values in registers, or twice as many of 16 bits where a row would fill more than a block.
template <typename T>
constexpr int kMostVectors = 32 / kVec<T>;
constexpr int kMostWide = 8;

template <typename T>
cudaError_t run(const T* x, int64_t stride_x, T* y, int64_t M, int64_t N, int max_cluster, cudaStream_t stream) {
  constexpr int kMost = kMostVectors<T>;
  const int64_t row_vectors = most_row_vectors(M, N, y);
  const int most = row_vectors <= int64_t{kUsualThreads} * kMost ? kMost : kMostWide;
  const SoftmaxPlan plan = softmax_plan(row_vectors, most, max_cluster, kRowThreads<T>);
  switch (plan.spread) {
    case Spread::kLanes:
      return with_vectors<kMost>(plan.vectors, [&](auto vectors) {
        const Grid grid = {ceil_div(M, plan.threads / plan.lanes), plan.threads};
        return launch(softmax_fwd_lanes_kernel<T, decltype(vectors)::value>, grid, stream, x, stride_x, y, M, N,
                      plan.lanes);
      });
    case Spread::kBlock:
      if (plan.vectors == kMost) {
        return launch_rows<MaxSum>(softmax_fwd_row_kernel<T, kMost, false>, plan, M, stream, x, stride_x, y, N);
      }
      return launch_rows<MaxSum>(softmax_fwd_row_kernel<T, kMostWide, false>, plan, M, stream, x, stride_x, y, N);
    case Spread::kCluster:
      return launch_rows<MaxSum>(softmax_fwd_row_kernel<T, kMostWide, true>, plan, M, stream, x, stride_x, y, N);
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

}  // namespace fusedmlp
