// Rows that one block cannot hold: each block of a cluster keeps a slice of them in shared memory.
//
// The slice comes by asynchronous copies, which need no registers for what is under way, so that several blocks, of
// several rows, load, wait for one another and store on the same multiprocessor. Each cluster also asks the L2 cache
// for a row that comes a little later: memory goes on reading while clusters reduce, wait and store.
//
// The warps of a row tell one another their results by messages: each warp writes its own into one place in the shared
// memory of every block, and every block waits on a barrier of its own until all places are filled. Nothing else is
// exchanged. Nobody waits for ever, or writes to a block that has not started or is gone:
// - A barrier has one phase, which completes when the expected bytes are there. One thread announces them before the
//   cluster's barrier, which every thread passes before its warp's message: no message meets a block that has not
//   started, or a barrier that expects nothing yet.
// - Each warp sends its messages before it waits, so all of them arrive and every wait ends.
// - A block ends after its wait, and so after the last message that it gets. It owes nobody else anything by then.
#pragma once

#include "cluster.cuh"
#include "rows.cuh"
#include "softmax_plan.h"

namespace fusedmlp {

// A thread's place in the row that its cluster has, where each of kOperands tensors has `per_warp` vectors a warp and
// the warps exchange a V each.
template <typename V, int kOperands>
struct Place {
  int64_t m;
  int lane, blocks, warps, warp_of_row;  // blocks and warps of the row
  Packed* kept;                          // of the lane's first vector of the first operand, the others kWarp apart
  int operand_step;                      // from there to the next operand
  V* messages;                           // one of each warp of the row
  uint64_t* barrier;
};

template <typename V, int kOperands>
__device__ __forceinline__ Place<V, kOperands> place_in_row(int per_warp) {
  const int blocks = cluster_size(), rank = cluster_rank();
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warps = kSliceWarps * blocks, step = kSliceWarps * per_warp;
  Packed* const slice = shared_memory<Packed>();
  V* const messages = reinterpret_cast<V*>(slice + kOperands * step);
  return {blockIdx.x / blocks, lane, blocks, warps, rank * kSliceWarps + warp, slice + warp * per_warp + lane, step,
          messages, reinterpret_cast<uint64_t*>(messages + warps)};
}

// Comes before the copies, so that the cluster meets while they are under way; exchange() waits for it.
template <typename V, int kOperands>
__device__ __forceinline__ void expect_all(const Place<V, kOperands>& place) {
  if (threadIdx.x == 0) expect_messages(place.barrier, place.warps * static_cast<int>(sizeof(V)));
  cluster_arrive_relaxed();
}

// The warp's value to every block of the row. Once it returns, `messages` holds those of all warps.
template <typename V, int kOperands>
__device__ __forceinline__ void exchange(const Place<V, kOperands>& place, V of_warp) {
  cluster_wait();
  if (place.lane < place.blocks) send(place.messages + place.warp_of_row, place.lane, of_warp, place.barrier);
  wait_for_messages(place.barrier);
}

// The part of one row that a warp has: the lane's vectors first, first + 32, ... below `end`.
template <typename T>
struct Part {
  const T* row;
  const T* lane;  // where vector `first` begins
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
  const int first = begin + lane;
  const T* const row = x + before;
  return {row, kept_pointer(row - span.shift + first * kVec<T>), span, first, min(begin + per_warp, span.vectors),
          readable_from, readable_to};
}

// The lane's vector number r on its way to its place after `kept`. Where it is cut and x ends, what the row has of it
// is read at once.
template <typename T>
__device__ __forceinline__ void request(const Part<T>& part, int r, float fill, Packed* kept) {
  const int v = part.first + r * kWarp;
  if (v >= part.end) return;
  if (v >= part.readable_from && v < part.readable_to) {
    copy16_async(kept + r * kWarp, part.lane + r * kWarp * kVec<T>);
  } else {
    kept[r * kWarp] = load_partial(part.row - part.span.shift, v * kVec<T>, part.span, from_float<T>(fill));
  }
}

// A vector that has arrived, with `fill` where the row has no element.
template <typename T>
__device__ __forceinline__ Packed arrived(const Part<T>& part, int v, float fill, Packed* kept) {
  const int begin = v * kVec<T>;
  if (begin < part.span.shift || begin + kVec<T> > part.span.end) {
    T* elements = reinterpret_cast<T*>(kept);
    // Rolled up, as in load_partial.
#pragma unroll 1
    for (int i = 0; i < kVec<T>; ++i) {
      if (begin + i < part.span.shift || begin + i >= part.span.end) elements[i] = from_float<T>(fill);
    }
  }
  return *kept;
}

// The warp's part of the row `ahead` rows later, if there is one, to L2: a line a lane. Addresses are those of the
// row's own elements, 128 bytes apart, so that each is in x and every line but perhaps the last is asked for.
template <typename T>
__device__ __forceinline__ void prefetch_ahead(const Part<T>& part, int64_t stride_x, int64_t rows_left, int ahead,
                                               int begin, int per_warp, int64_t N) {
  if (ahead == 0 || rows_left <= ahead) return;
  constexpr int kLine = 128 / 16;
  const T* const row = part.row + ahead * stride_x;
  const int end = min(begin + per_warp, static_cast<int>(N) / kVec<T>);
#pragma unroll 1
  for (int v = begin + (part.first - begin) * kLine; v < end; v += kWarp * kLine) prefetch_line(row + v * kVec<T>);
}

}  // namespace fusedmlp
