// dx of a row of softmax that one block cannot hold, by a cluster (softmax_cluster.cuh).
#pragma once

#include "softmax_bwd.cuh"
#include "softmax_cluster.cuh"

namespace fusedmlp {

// A cluster of blocks reads one row of dy and y, `per_warp` vectors of each a warp, and writes dx. kVectors: that a
// thread has at most, of both together.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kSliceThreads, kSliceBlocks)
    softmax_bwd_cluster_kernel(const T* __restrict__ dy, int64_t stride_dy, const T* __restrict__ y, int64_t stride_y,
                               T* __restrict__ dx, int64_t M, int64_t N, int per_warp, int ahead) {
  const auto place = place_in_row<float, 2>(per_warp);
  expect_all(place);
  const int64_t m = place.m;
  const int begin = place.warp_of_row * per_warp;
  const auto span = span_of<int>(dx + m * N, N);
  const Part<T> part_dy = part_of(dy, stride_dy, m, M, span, begin, per_warp);
  const Part<T> part_y = part_of(y, stride_y, m, M, span, begin, per_warp);
  Packed *const kept_dy = place.kept, *const kept_y = place.kept + place.operand_step;
  constexpr int kEach = kVectors / 2;
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    request(part_dy, r, 0.0f, kept_dy);
    request(part_y, r, 0.0f, kept_y);
  }
  commit_copies();
  prefetch_ahead(part_dy, stride_dy, M - m, ahead, begin, per_warp, N);
  prefetch_ahead(part_y, stride_y, M - m, ahead, begin, per_warp, N);

  wait_copies<0>();
  float of_lane = 0.0f;
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const int v = part_dy.first + r * kWarp;
    if (v >= part_dy.end) continue;
    const Packed packed_dy[1] = {arrived(part_dy, v, 0.0f, kept_dy + r * kWarp)};
    const Packed packed_y[1] = {arrived(part_y, v, 0.0f, kept_y + r * kWarp)};
    of_lane += dot<T>(packed_dy, packed_y);
  }
  exchange(place, over_lanes(of_lane, kWarp, Sum{}));

  float of_row = 0.0f;
  for (int i = place.lane; i < place.warps; i += kWarp) of_row += place.messages[i];
  const float sum = over_lanes(of_row, kWarp, Sum{});
#pragma unroll 4
  for (int r = 0; r < kEach; ++r) {
    const int v = part_dy.first + r * kWarp;
    if (v >= part_dy.end) continue;
    const Packed packed_dy[1] = {kept_dy[r * kWarp]}, packed_y[1] = {kept_y[r * kWarp]};
    store_dx<T>(dx + m * N, span, v, 0, sum, packed_dy, packed_y);
  }
}

}  // namespace fusedmlp
