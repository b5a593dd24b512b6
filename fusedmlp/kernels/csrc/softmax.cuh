// What every softmax forward kernel computes with: maxima, exponentials, and pairs of both.
//
// Each group of threads computes (max, sum of exponentials relative to that max); two such pairs combine into one. A
// group that has seen nothing but -inf counts relative to 0. A row of -inf, or one with +inf or NaN, becomes NaN by
// itself (0 * (1 / 0), inf - inf), as in torch.
#pragma once

#include "rows.cuh"

namespace fusedmlp {

struct MaxSum {
  float max;
  float sum;
};

__device__ __forceinline__ MaxSum lane_xor(MaxSum value, int mask) {
  return {lane_xor(value.max, mask), lane_xor(value.sum, mask)};
}

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

// Without NaN: fmaxf drops one, unless there is nothing else.
template <int kCount>
__device__ __forceinline__ float largest(const float (&values)[kCount]) {
  float max = -INFINITY;
#pragma unroll
  for (const float value : values) max = fmaxf(max, value);
  return max;
}

template <typename T, int kVectors>
__device__ __forceinline__ float largest(const Packed (&packed)[kVectors]) {
  Packed largest_of_each = packed[0];
#pragma unroll
  for (int r = 1; r < kVectors; ++r) largest_of_each = packed_max<T>(largest_of_each, packed[r]);
  float values[kVec<T>];
  unpack<T>(largest_of_each, values);
  return largest(values);
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

// The softmax of one vector of x, e^(x - max) * scale, into its place in the row.
template <typename T, typename Index>
__device__ __forceinline__ void store_softmax(T* row, const Span<Index>& span, Index v, float max, float scale,
                                              Packed packed) {
  float values[kVec<T>];
  unpack<T>(packed, values);
  exponentials(max, values);
#pragma unroll
  for (float& value : values) value *= scale;
  store_vector(row, span, v, values);
}

}  // namespace fusedmlp
