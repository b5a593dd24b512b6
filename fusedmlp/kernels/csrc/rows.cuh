// A row as 16-byte vectors, and what the threads of a row agree on.
#pragma once

#include "device.cuh"

namespace fusedmlp {

// A row of N elements on the grid of 16-byte vectors that it lies on: it begins `shift` elements after a multiple of 16
// bytes. So every full vector is one aligned access, for rows of any length; only the first and the last one can be
// partial. Tensors whose rows have the same shift share one span. Index is int where the row is kept on chip, which
// saves registers.
template <typename Index>
struct Span {
  int shift;
  Index end;      // of the row, counted from the first vector's begin
  Index vectors;  // that the row touches
  bool whole;     // no vector is partial
};

template <typename Index, typename T>
__device__ __forceinline__ Span<Index> span_of(const T* row, int64_t N) {
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
  const Index end = shift + static_cast<Index>(N);
  return {shift, end, (end + kVec<T> - 1) / kVec<T>, shift == 0 && N % kVec<T> == 0};
}

// Elements of a partial vector that are not the row's are `fill`.
template <typename T, typename Index>
__device__ __forceinline__ Packed load_partial(const T* base, Index first, const Span<Index>& span, T fill) {
  Packed packed = {};
  // Rolled up: there are at most two such vectors in a row, and unrolled they would take the registers of the others.
#pragma unroll 1
  for (int i = kVec<T> - 1; i >= 0; --i) {
    const Index index = first + i;
    packed = push_front(packed, index >= span.shift && index < span.end ? base[index] : fill);
  }
  return packed;
}

// Vectors first, first + step, ... of a row into registers; `fill` stands where the row has no element.
template <typename T, typename Index, int kVectors>
__device__ __forceinline__ void load_vectors(const T* row, const Span<Index>& span, Index first, Index step, float fill,
                                             Packed (&out)[kVectors]) {
  float fills[kVec<T>];
#pragma unroll
  for (float& value : fills) value = fill;
  if (span.whole) {
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
      const Index v = first + r * step;
      out[r] = v < span.vectors ? load16(row + v * kVec<T>) : pack<T>(fills);
    }
    return;
  }
  const T* base = row - span.shift;
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    const Index v = first + r * step;
    const Index begin = v * kVec<T>;
    if (begin >= span.shift && begin + kVec<T> <= span.end) {
      out[r] = load16(base + begin);
    } else {
      out[r] = v < span.vectors ? load_partial(base, begin, span, from_float<T>(fill)) : pack<T>(fills);
    }
  }
}

// One vector of results into its place, without the elements that are not the row's.
template <typename T, typename Index>
__device__ __forceinline__ void store_vector(T* row, const Span<Index>& span, Index v, const float (&values)[kVec<T>]) {
  T* base = row - span.shift;
  const Index begin = v * kVec<T>;
  if (begin >= span.shift && begin + kVec<T> <= span.end) {
    store16(base + begin, pack<T>(values));
  } else if (v < span.vectors) {
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) {
      const Index index = begin + i;
      if (index >= span.shift && index < span.end) base[index] = from_float<T>(values[i]);
    }
  }
}

// Groups of `lanes` neighbouring threads, a power of two up to 32, combine their values; all of them get the result,
// and in the same order every time. V has a lane_xor() of its own, as float has.
template <typename V, typename Combine>
__device__ __forceinline__ V over_lanes(V value, int lanes, Combine combine) {
  for (int mask = lanes >> 1; mask > 0; mask >>= 1) value = combine(value, lane_xor(value, mask));
  return value;
}

struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// What the row's warps contribute, of one block.
constexpr int kMaxWarps = 32;
template <typename V>
constexpr int kRowSharedBytes = kMaxWarps * static_cast<int>(sizeof(V));

// All threads of a block that has one row combine their warps' values (each warp has agreed on one before).
template <typename V, typename Combine>
__device__ __forceinline__ V over_row(V of_warp, V neutral, Combine combine) {
  V* warps = shared_memory<V>();
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  if (lane == 0) warps[warp] = of_warp;
  block_sync();
  return over_lanes(lane < num_warps ? warps[lane] : neutral, kWarp, combine);
}

}  // namespace fusedmlp
