// What the hardware does, under names that kernels can be read by: 16-byte accesses, conversions, shuffles, clusters.
//
// Everything that is not plain C++ is in this file. Arithmetic is fp32; bf16 and fp16 are storage.
#pragma once

#include <cstdint>

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace fusedmlp {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Elements in 16 bytes, the widest access one thread can make.
template <typename T>
constexpr int kVec = 16 / static_cast<int>(sizeof(T));

// 2^x and 1 / sqrt(x), one instruction each, relative error about 1e-7; results below the normal range become 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// 16 bytes as they lie in memory: four words of one fp32 or two 16-bit elements.
using Packed = uint4;

// One access of 16 bytes each; the memory is global, and no kernel here reads what it writes.
__device__ __forceinline__ Packed load16(const void* pointer) { return __ldg(static_cast<const Packed*>(pointer)); }
__device__ __forceinline__ void store16(void* pointer, Packed packed) {
  // An assignment is split into four stores where the compiler sees the elements one by one.
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(pointer)), "r"(packed.x), "r"(packed.y), "r"(packed.z), "r"(packed.w)
               : "memory");
}

// Makes the compiler unpack these again once `then` is known, which is cheaper than keeping twice as many registers
// until then. All grids here are one-dimensional, so blockIdx.z is 0, which the compiler cannot know.
template <int kCount>
__device__ __forceinline__ void keep_packed_until(float then, Packed (&packed)[kCount]) {
  const uint32_t zero = __float_as_uint(then) & blockIdx.z;
#pragma unroll
  for (Packed& p : packed) p = {p.x | zero, p.y | zero, p.z | zero, p.w | zero};
}

__device__ __forceinline__ void unpack_word(uint32_t word, float (&out)[1], float*) { out[0] = __uint_as_float(word); }
__device__ __forceinline__ void unpack_word(uint32_t word, float (&out)[2], __nv_bfloat16*) {
  // A bf16 is the upper half of an fp32.
  out[0] = __uint_as_float(word << 16);
  out[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void unpack_word(uint32_t word, float (&out)[2], __half*) {
  out[0] = __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xffffu)));
  out[1] = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
}

__device__ __forceinline__ uint32_t pack_word(const float (&in)[1], float*) { return __float_as_uint(in[0]); }
__device__ __forceinline__ uint32_t pack_word(const float (&in)[2], __nv_bfloat16*) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(in[0], in[1]);
  return static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16 | __bfloat16_as_ushort(pair.x);
}
__device__ __forceinline__ uint32_t pack_word(const float (&in)[2], __half*) {
  const __half2 pair = __floats2half2_rn(in[0], in[1]);
  return static_cast<uint32_t>(__half_as_ushort(__high2half(pair))) << 16 | __half_as_ushort(__low2half(pair));
}

template <typename T>
__device__ __forceinline__ void unpack(Packed packed, float (&out)[kVec<T>]) {
  constexpr int kPerWord = kVec<T> / 4;
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float values[kPerWord];
    unpack_word(words[w], values, static_cast<T*>(nullptr));
#pragma unroll
    for (int i = 0; i < kPerWord; ++i) out[w * kPerWord + i] = values[i];
  }
}

template <typename T>
__device__ __forceinline__ Packed pack(const float (&in)[kVec<T>]) {
  constexpr int kPerWord = kVec<T> / 4;
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float values[kPerWord];
#pragma unroll
    for (int i = 0; i < kPerWord; ++i) values[i] = in[w * kPerWord + i];
    words[w] = pack_word(values, static_cast<T*>(nullptr));
  }
  return {words[0], words[1], words[2], words[3]};
}

// All elements move up by one, and `element` becomes the first: so 16 bytes are put together from last to first,
// without indexing registers.
__device__ __forceinline__ Packed push_front(Packed packed, float element) {
  return {__float_as_uint(element), packed.x, packed.y, packed.z};
}
__device__ __forceinline__ Packed push_bits(Packed packed, unsigned short bits) {
  return {packed.x << 16 | bits, __funnelshift_l(packed.x, packed.y, 16), __funnelshift_l(packed.y, packed.z, 16),
          __funnelshift_l(packed.z, packed.w, 16)};
}
__device__ __forceinline__ Packed push_front(Packed packed, __half element) {
  return push_bits(packed, __half_as_ushort(element));
}
__device__ __forceinline__ Packed push_front(Packed packed, __nv_bfloat16 element) {
  return push_bits(packed, __bfloat16_as_ushort(element));
}

// The value of the lane whose number differs in the bits of `mask`. All 32 lanes call it.
__device__ __forceinline__ float lane_xor(float value, int mask) { return __shfl_xor_sync(kAllLanes, value, mask); }

__device__ __forceinline__ void block_sync() { __syncthreads(); }

// The shared memory that the launch asked for, aligned to 16 bytes.
template <typename V>
__device__ __forceinline__ V* shared_memory() {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  return reinterpret_cast<V*>(shared_bytes);
}

// A cluster: thread blocks that run at the same time and can write to each other's shared memory (sm_90 and newer).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ int cluster_rank() {
  return static_cast<int>(cooperative_groups::this_cluster().block_rank());
}
__device__ __forceinline__ int cluster_size() {
  return static_cast<int>(cooperative_groups::this_cluster().num_blocks());
}
// Between arrive and wait there may be work that needs no other block. Writes before arrive are seen after wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where `pointer`, into this block's shared memory, lies in that of block `rank`.
template <typename V>
__device__ __forceinline__ V* shared_of(V* pointer, int rank) {
  return cooperative_groups::this_cluster().map_shared_rank(pointer, rank);
}
#else

__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
template <typename V>
__device__ __forceinline__ V* shared_of(V* pointer, int) {
  return pointer;
}
#endif

}  // namespace fusedmlp
