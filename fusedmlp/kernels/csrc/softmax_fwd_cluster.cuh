// Softmax of a row that one block cannot hold, by a cluster (softmax_cluster.cuh).
#pragma once

#include "softmax.cuh"
#include "softmax_cluster.cuh"

namespace fusedmlp {

// (max, sum) of the lane's vectors from_vector, ... and of what came before; few at a time are in registers.
template <typename T, int kCount>
__device__ __forceinline__ MaxSum add_arrived(MaxSum sofar, const Part<T>& part, Packed* kept, int from_vector) {
  constexpr int kTogether = 4;
  float fills[kVec<T>];
#pragma unroll
  for (float& value : fills) value = -INFINITY;
  for (int r = from_vector; r < from_vector + kCount; r += kTogether) {
    Packed packed[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int v = part.first + (r + i) * kWarp;
      packed[i] = v < part.end ? arrived(part, v, -INFINITY, kept + (r + i) * kWarp) : pack<T>(fills);
    }
    const float max = fmaxf(sofar.max, largest<T>(packed));
    sofar = {max, sofar.sum * rescale(sofar.max, max) + sum_of_exponentials<T>(max, packed)};
  }
  return sofar;
}

// A cluster of blocks reads one row of x, `per_warp` vectors a warp, and writes its softmax.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kSliceThreads, kSliceBlocks)
    softmax_fwd_cluster_kernel(const T* __restrict__ x, int64_t stride_x, T* __restrict__ y, int64_t M, int64_t N,
                               int per_warp, int ahead) {
  const auto place = place_in_row<MaxSum, 1>(per_warp);
  expect_all(place);
  const int64_t m = place.m;
  const int begin = place.warp_of_row * per_warp;
  const auto span = span_of<int>(y + m * N, N);
  const Part<T> part = part_of(x, stride_x, m, M, span, begin, per_warp);
  Packed* const kept = place.kept;
  constexpr int kHalf = kVectors / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int r = half * kHalf; r < (half + 1) * kHalf; ++r) request(part, r, -INFINITY, kept);
    commit_copies();
  }
  prefetch_ahead(part, stride_x, M - m, ahead, begin, per_warp, N);

  wait_copies<1>();
  MaxSum of_lane = add_arrived<T, kHalf>(nothing(), part, kept, 0);
  wait_copies<0>();
  of_lane = add_arrived<T, kHalf>(of_lane, part, kept, kHalf);
  const float warp_max = over_lanes(of_lane.max, kWarp, Max{});
  const float warp_sum = over_lanes(of_lane.sum * rescale(of_lane.max, warp_max), kWarp, Sum{});
  exchange(place, MaxSum{warp_max, warp_sum});

  MaxSum of_row = nothing();
  for (int i = place.lane; i < place.warps; i += kWarp) of_row = Combine{}(of_row, place.messages[i]);
  const float row_max = over_lanes(of_row.max, kWarp, Max{});
  const float scale = 1.0f / over_lanes(of_row.sum * rescale(of_row.max, row_max), kWarp, Sum{});
#pragma unroll 4
  for (int r = 0; r < kVectors; ++r) {
    const int v = part.first + r * kWarp;
    if (v < part.end) store_softmax(y + m * N, span, v, row_max, scale, kept[r * kWarp]);
  }
}

}  // namespace fusedmlp
