// Softmax of a row that one block cannot hold: each block of a cluster keeps a slice of it in shared memory.
//
// The slice comes by asynchronous copies, which need no registers for what is under way, so that several blocks, of
// several rows, load, wait for one another and store on the same multiprocessor.
//
// The warps of a row tell one another their (max, sum) by messages: each warp writes its own into one place in the
// shared memory of every block, and every block waits on a barrier of its own until all places are filled. Nothing
// else is exchanged. Nobody waits for ever, or writes to a block that has not started or is gone:
// - A barrier has one phase, which completes when the expected bytes are there. One thread announces them before the
//   cluster's barrier, which every thread passes before its warp's message: no message meets a block that has not
//   started, or a barrier that expects nothing yet.
// - Each warp sends its messages before it waits, so all of them arrive and every wait ends.
// - A block ends after its wait, and so after the last message that it gets. It owes nobody else anything by then.
#pragma once

#include "softmax.cuh"
#include "softmax_plan.h"

namespace fusedmlp {

// The part of one row that a warp has: the lane's vectors first, first + 32, ... below `end`.
template <typename T>
struct Part {
  const T* row;
  Span<int> span;
  int first, end;
  int readable_from, readable_to;  // vectors that lie in x wholly, though perhaps not in the row
};

template <typename T>
__device__ __forceinline__ Part<T> part_of(const T* x, int64_t stride_x, int64_t m, int64_t M, const Span<int>& span,
                                           int begin, int per_warp) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  // Rows before and after this one are in x as well.
  const int64_t before = m * stride_x, after = (M - 1 - m) * stride_x;
  const int readable_from = before < span.shift ? 1 : 0;
  const int readable_to = after < kVec<T> ? (static_cast<int>(after) + span.end) / kVec<T> : span.vectors;
  return {x + before, span, begin + lane, min(begin + per_warp, span.vectors), readable_from, readable_to};
}

// One vector on its way to `kept`. Where it is cut and x ends, what the row has of it is read at once.
template <typename T>
__device__ __forceinline__ void request(const Part<T>& part, int v, Packed* kept) {
  if (v >= part.end) return;
  const T* base = part.row - part.span.shift;
  if (v >= part.readable_from && v < part.readable_to) {
    copy16_async(kept, base + v * kVec<T>);
  } else {
    *kept = load_partial(base, v * kVec<T>, part.span, from_float<T>(-INFINITY));
  }
}

// A vector that has arrived, with -inf where the row has no element.
template <typename T>
__device__ __forceinline__ Packed arrived(const Part<T>& part, int v, Packed* kept) {
  const int begin = v * kVec<T>;
  if (begin < part.span.shift || begin + kVec<T> > part.span.end) {
    T* elements = reinterpret_cast<T*>(kept);
    // Rolled up, as in load_partial.
#pragma unroll 1
    for (int i = 0; i < kVec<T>; ++i) {
      if (begin + i < part.span.shift || begin + i >= part.span.end) elements[i] = from_float<T>(-INFINITY);
    }
  }
  return *kept;
}

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
      packed[i] = v < part.end ? arrived(part, v, kept + (r + i) * kWarp) : pack<T>(fills);
    }
    const float max = fmaxf(sofar.max, largest<T>(packed));
    sofar = {max, sofar.sum * rescale(sofar.max, max) + sum_of_exponentials<T>(max, packed)};
  }
  return sofar;
}

// A cluster of blocks reads one row of x, `per_warp` vectors a warp, and writes its softmax.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kSliceThreads, slice_blocks(kVectors))
    softmax_fwd_cluster_kernel(const T* __restrict__ x, int64_t stride_x, T* __restrict__ y, int64_t M, int64_t N,
                               int per_warp) {
  const int blocks = cluster_size(), rank = cluster_rank();
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t m = blockIdx.x / blocks;
  const int warps = kSliceWarps * blocks, warp_of_row = rank * kSliceWarps + warp;
  Packed* const slice = shared_memory<Packed>();
  Packed* const kept = slice + warp * per_warp + lane;
  MaxSum* const messages = reinterpret_cast<MaxSum*>(slice + kSliceWarps * per_warp);
  uint64_t* const barrier = reinterpret_cast<uint64_t*>(messages + warps);

  const auto span = span_of<int>(y + m * N, N);
  const Part<T> part = part_of(x, stride_x, m, M, span, warp_of_row * per_warp, per_warp);
  constexpr int kHalf = kVectors / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int r = half * kHalf; r < (half + 1) * kHalf; ++r) request(part, part.first + r * kWarp, kept + r * kWarp);
    commit_copies();
  }
  if (threadIdx.x == 0) expect_messages(barrier, warps * static_cast<int>(sizeof(MaxSum)));
  cluster_arrive();
  cluster_wait();

  wait_copies<1>();
  MaxSum of_lane = add_arrived<T, kHalf>(nothing(), part, kept, 0);
  wait_copies<0>();
  of_lane = add_arrived<T, kHalf>(of_lane, part, kept, kHalf);
  const float warp_max = over_lanes(of_lane.max, kWarp, Max{});
  const float warp_sum = over_lanes(of_lane.sum * rescale(of_lane.max, warp_max), kWarp, Sum{});
  if (lane < blocks) send(&messages[warp_of_row].max, lane, warp_max, warp_sum, barrier);
  wait_for_messages(barrier);

  MaxSum of_row = nothing();
  for (int i = lane; i < warps; i += kWarp) of_row = Combine{}(of_row, messages[i]);
  const float row_max = over_lanes(of_row.max, kWarp, Max{});
  const float scale = 1.0f / over_lanes(of_row.sum * rescale(of_row.max, row_max), kWarp, Sum{});
#pragma unroll 4
  for (int r = 0; r < kVectors; ++r) {
    const int v = part.first + r * kWarp;
    if (v < part.end) store_softmax(y + m * N, span, v, row_max, scale, kept[r * kWarp]);
  }
}

}  // namespace fusedmlp
