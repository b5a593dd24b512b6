// Sums over rows: the bias gradient, alone or in one pass with dpreact = dy * gelu'(preact).
#include <type_traits>

#include "gelu.cuh"
#include "launch.cuh"

namespace fusedmlp {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;

// What is summed: x itself, or dy * gelu'(preact), which is written as well.
enum class Term { kPlain, kErf, kTanh };

template <typename T, int kWidth>
__device__ __forceinline__ void load_columns(const T* pointer, float (&out)[kWidth]) {
  if constexpr (kWidth == 1) {
    out[0] = to_float(*pointer);
  } else {
    unpack<T>(load16(pointer), out);
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_columns(T* pointer, const float (&in)[kWidth]) {
  if constexpr (kWidth == 1) {
    *pointer = from_float<T>(in[0]);
  } else {
    store16(pointer, pack<T>(in));
  }
}

// One block reads a strip of rows and kWarp * kWidth columns of x (dy), and writes one row of `partial`. A warp takes
// every kWarps-th row of the strip, a thread kWidth neighbouring columns: 16 bytes of them, or one.
template <typename T, int kWidth, Term kTerm>
__global__ void __launch_bounds__(kThreads)
    strip_sums_kernel(const T* __restrict__ x, const T* __restrict__ preact, T* __restrict__ dpreact,
                      float* __restrict__ partial, int64_t M, int64_t N, int64_t strip_rows) {
  constexpr int kColumns = kWarp * kWidth;
  const int64_t tiles = ceil_div(N, kColumns);
  const int64_t strip = blockIdx.x / tiles;
  const int64_t first_column = blockIdx.x % tiles * kColumns;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t column = first_column + lane * kWidth;
  const int64_t end = min(M, (strip + 1) * strip_rows);
  float sums[kWidth] = {};
  if (column < N) {
#pragma unroll 2
    for (int64_t row = strip * strip_rows + warp; row < end; row += kWarps) {
      const int64_t offset = row * N + column;
      float values[kWidth];
      load_columns(x + offset, values);
      if constexpr (kTerm != Term::kPlain) {
        float preacts[kWidth];
        load_columns(preact + offset, preacts);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[i] *= gelu_grad<kTerm == Term::kTanh>(preacts[i]);
        store_columns(dpreact + offset, values);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[i] += values[i];
    }
  }
  float* shared = shared_memory<float>();  // (kWarps, kColumns)
#pragma unroll
  for (int i = 0; i < kWidth; ++i) shared[warp * kColumns + lane * kWidth + i] = sums[i];
  block_sync();
  for (int c = static_cast<int>(threadIdx.x); c < kColumns && first_column + c < N; c += kThreads) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += shared[w * kColumns + c];
    partial[strip * N + first_column + c] = sum;
  }
}

// One block adds all strips of kWarp columns: a warp every kWarps-th strip, then the warps' sums in order.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_strips_kernel(const float* __restrict__ partial, T* __restrict__ out, int64_t strips, int64_t N) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  float sum = 0.0f;
  if (column < N) {
#pragma unroll 4
    for (int64_t strip = warp; strip < strips; strip += kWarps) sum += partial[strip * N + column];
  }
  float* shared = shared_memory<float>();  // (kWarps, kWarp)
  shared[threadIdx.x] = sum;
  block_sync();
  if (warp == 0 && column < N) {
    for (int w = 1; w < kWarps; ++w) sum += shared[w * kWarp + lane];
    out[column] = from_float<T>(sum);
  }
}

template <typename T, Term kTerm>
cudaError_t launch_strip_sums(const void* x, const void* preact, void* dpreact, float* partial, int64_t M, int64_t N,
                              Strips strips, cudaStream_t stream) {
  const auto start = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    constexpr int kColumns = kWarp * kWidth;
    const Grid grid = {strips.count * ceil_div(N, kColumns), kThreads, 1,
                       kWarps * kColumns * static_cast<int>(sizeof(float))};
    return launch(strip_sums_kernel<T, kWidth, kTerm>, grid, stream, static_cast<const T*>(x),
                  static_cast<const T*>(preact), static_cast<T*>(dpreact), partial, M, N, strips.rows);
  };
  // Rows of another length are not aligned to 16 bytes.
  if (N % kVec<T> == 0) return start(std::integral_constant<int, kVec<T>>{});
  return start(std::integral_constant<int, 1>{});
}

}  // namespace

Strips strips_of(int64_t M, int64_t N, Dtype dtype) {
  const int64_t width = N * size_of(dtype) % 16 == 0 ? 16 / size_of(dtype) : 1;
  // Long strips for fewer partial sums, short ones where long ones would leave most of a GPU idle.
  const int64_t rows = ceil_div(M, 128) * ceil_div(N, kWarp * width) >= 512 ? 128 : 32;
  return {rows, ceil_div(M, rows)};
}

cudaError_t dgelu_strip_sums(Dtype dtype, Approximate approximate, const void* dy, const void* preact, void* dpreact,
                             float* partial, int64_t M, int64_t N, cudaStream_t stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return with_approximate(approximate, [&](auto tanh) {
      constexpr Term kTerm = decltype(tanh)::value ? Term::kTanh : Term::kErf;
      return launch_strip_sums<T, kTerm>(dy, preact, dpreact, partial, M, N, strips_of(M, N, dtype), stream);
    });
  });
}

cudaError_t strip_sums(Dtype dtype, const void* x, float* partial, int64_t M, int64_t N, cudaStream_t stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch_strip_sums<T, Term::kPlain>(x, nullptr, nullptr, partial, M, N, strips_of(M, N, dtype), stream);
  });
}

cudaError_t add_strips(Dtype dtype, const float* partial, void* out, int64_t strips, int64_t N, cudaStream_t stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Grid grid = {ceil_div(N, kWarp), kThreads, 1, kThreads * static_cast<int>(sizeof(float))};
    return launch(add_strips_kernel<T>, grid, stream, partial, static_cast<T*>(out), strips, N);
  });
}

}  // namespace fusedmlp
