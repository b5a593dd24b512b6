// What the hardware does, under names that kernels can be read by: 16-byte accesses, conversions, shuffles, copies.
//
// Everything that is not plain C++ is in this file and in cluster.cuh. Arithmetic is fp32; bf16 and fp16 are storage.
#pragma once

#include <cstdint>

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

// Of a power of two: a division by it becomes a shift.
__device__ __forceinline__ int log2_of(int power) { return __ffs(power) - 1; }

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

// Makes the compiler keep an address, where it would compute it again for each of many accesses nearby.
template <typename V>
__device__ __forceinline__ V* kept_pointer(V* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
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

// Elementwise maximum; NaN only where both are.
__device__ __forceinline__ uint32_t word_max(uint32_t a, uint32_t b, float*) {
  return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}
__device__ __forceinline__ uint32_t word_max(uint32_t a, uint32_t b, __nv_bfloat16*) {
  uint32_t max;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(max) : "r"(a), "r"(b));
  return max;
}
__device__ __forceinline__ uint32_t word_max(uint32_t a, uint32_t b, __half*) {
  uint32_t max;
  asm("max.f16x2 %0, %1, %2;" : "=r"(max) : "r"(a), "r"(b));
  return max;
}
template <typename T>
__device__ __forceinline__ Packed packed_max(Packed a, Packed b) {
  constexpr T* kType = nullptr;
  return {word_max(a.x, b.x, kType), word_max(a.y, b.y, kType), word_max(a.z, b.z, kType), word_max(a.w, b.w, kType)};
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

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, past the registers. They are there for the thread that asked once it has
// waited for the group of copies that they are in; a group is what was asked for since the last commit.
__device__ __forceinline__ void copy16_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
// The cache line that the address is in, from global memory to L2, if it is not there yet.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups but the last kPending.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace fusedmlp
