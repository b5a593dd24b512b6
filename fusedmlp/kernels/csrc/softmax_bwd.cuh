// What every softmax backward kernel computes with: sum(y * dy), and dx = y * (dy - sum).
#pragma once

#include "rows.cuh"

namespace fusedmlp {

template <typename T, int kVectors>
__device__ __forceinline__ float dot(const Packed (&dy)[kVectors], const Packed (&y)[kVectors]) {
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    float a[kVec<T>], b[kVec<T>];
    unpack<T>(dy[r], a);
    unpack<T>(y[r], b);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) sum = fmaf(a[i], b[i], sum);
  }
  return sum;
}

template <typename T, typename Index, int kVectors>
__device__ __forceinline__ void store_dx(T* dx, const Span<Index>& span, Index first, Index step, float sum,
                                         const Packed (&dy)[kVectors], const Packed (&y)[kVectors]) {
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    float a[kVec<T>], b[kVec<T>];
    unpack<T>(dy[r], a);
    unpack<T>(y[r], b);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) a[i] = b[i] * (a[i] - sum);
    store_vector(dx, span, first + r * step, a);
  }
}

}  // namespace fusedmlp
