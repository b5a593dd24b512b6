// Pointwise GELU, forward and backward: as fast as memory, so each thread makes a few 16-byte accesses.
#include "gelu.cuh"
#include "launch.cuh"

namespace fusedmlp {
namespace {

// Small blocks, so that the next one starts as soon as 4 KB are written.
constexpr int kThreads = 128;
// 16-byte accesses of one thread: enough bytes in flight, few enough registers.
constexpr int kLoads = 2;
template <typename T>
constexpr int64_t kBlock = kThreads * kLoads * kVec<T>;

// One block reads kBlock<T> consecutive elements of x and writes gelu(x).
template <typename T, bool kTanh>
__global__ void __launch_bounds__(kThreads) gelu_fwd_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n) {
  const int64_t start = static_cast<int64_t>(blockIdx.x) * kBlock<T>;
  if (start + kBlock<T> > n) {
    for (int64_t i = start + threadIdx.x; i < n; i += kThreads) y[i] = from_float<T>(gelu<kTanh>(to_float(x[i])));
    return;
  }
  Packed packed[kLoads];
#pragma unroll
  for (int r = 0; r < kLoads; ++r) packed[r] = load16(x + start + (r * kThreads + threadIdx.x) * kVec<T>);
#pragma unroll
  for (int r = 0; r < kLoads; ++r) {
    float values[kVec<T>];
    unpack<T>(packed[r], values);
#pragma unroll
    for (float& value : values) value = gelu<kTanh>(value);
    store16(y + start + (r * kThreads + threadIdx.x) * kVec<T>, pack<T>(values));
  }
}

// One block reads kBlock<T> consecutive elements of dy and x and writes dx = dy * gelu'(x).
template <typename T, bool kTanh>
__global__ void __launch_bounds__(kThreads)
    gelu_bwd_kernel(const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx, int64_t n) {
  const int64_t start = static_cast<int64_t>(blockIdx.x) * kBlock<T>;
  if (start + kBlock<T> > n) {
    for (int64_t i = start + threadIdx.x; i < n; i += kThreads) {
      dx[i] = from_float<T>(to_float(dy[i]) * gelu_grad<kTanh>(to_float(x[i])));
    }
    return;
  }
  Packed packed_x[kLoads], packed_dy[kLoads];
#pragma unroll
  for (int r = 0; r < kLoads; ++r) {
    const int64_t offset = start + (r * kThreads + threadIdx.x) * kVec<T>;
    packed_x[r] = load16(x + offset);
    packed_dy[r] = load16(dy + offset);
  }
#pragma unroll
  for (int r = 0; r < kLoads; ++r) {
    float gradient[kVec<T>], values[kVec<T>];
    unpack<T>(packed_dy[r], gradient);
    unpack<T>(packed_x[r], values);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) gradient[i] *= gelu_grad<kTanh>(values[i]);
    store16(dx + start + (r * kThreads + threadIdx.x) * kVec<T>, pack<T>(gradient));
  }
}

template <typename T>
Grid grid_of(int64_t n) {
  return {ceil_div(n, kBlock<T>), kThreads};
}

}  // namespace

cudaError_t gelu_fwd(Dtype dtype, Approximate approximate, const void* x, void* y, int64_t n, cudaStream_t stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return with_approximate(approximate, [&](auto tanh) {
      return launch(gelu_fwd_kernel<T, decltype(tanh)::value>, grid_of<T>(n), stream, static_cast<const T*>(x),
                    static_cast<T*>(y), n);
    });
  });
}

cudaError_t gelu_bwd(Dtype dtype, Approximate approximate, const void* dy, const void* x, void* dx, int64_t n,
                     cudaStream_t stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return with_approximate(approximate, [&](auto tanh) {
      return launch(gelu_bwd_kernel<T, decltype(tanh)::value>, grid_of<T>(n), stream, static_cast<const T*>(dy),
                    static_cast<const T*>(x), static_cast<T*>(dx), n);
    });
  });
}

}  // namespace fusedmlp
