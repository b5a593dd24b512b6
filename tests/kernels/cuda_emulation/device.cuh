// csrc/device.cuh on the CPU: the same names, checked more strictly than a GPU does.
#pragma once

#include <algorithm>
#include <cstring>

#include "cuda_runtime_api.h"

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};

namespace fusedmlp {

constexpr int kWarp = 32;

template <typename T>
constexpr int kVec = 16 / static_cast<int>(sizeof(T));

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}
inline float rsqrt_approx(float x) { return 1.0f / std::sqrt(x); }

inline int log2_of(int power) {
  emulation::require(power > 0 && (power & (power - 1)) == 0, "a logarithm that is no integer");
  return __builtin_ctz(static_cast<unsigned>(power));
}

inline float to_float(float x) { return x; }
inline float to_float(__half x) { return static_cast<float>(bits_as<_Float16>(x.bits)); }
inline float to_float(__nv_bfloat16 x) { return bits_as<float>(static_cast<uint32_t>(x.bits) << 16); }

template <typename T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline __half from_float<__half>(float x) {
  return {bits_as<uint16_t>(static_cast<_Float16>(x))};
}
template <>
inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  if (std::isnan(x)) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

struct Packed {
  unsigned char bytes[16];
};

inline void require_aligned(const void* pointer) {
  emulation::require(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, "a misaligned access of 16 bytes");
}
inline Packed load16(const void* pointer) {
  require_aligned(pointer);
  Packed packed;
  std::memcpy(&packed, pointer, 16);
  return packed;
}
inline void store16(void* pointer, Packed packed) {
  require_aligned(pointer);
  std::memcpy(pointer, &packed, 16);
}

template <typename T>
void unpack(Packed packed, float (&out)[kVec<T>]) {
  T elements[kVec<T>];
  std::memcpy(elements, &packed, 16);
  for (int i = 0; i < kVec<T>; ++i) out[i] = to_float(elements[i]);
}
template <typename T>
Packed pack(const float (&in)[kVec<T>]) {
  T elements[kVec<T>];
  for (int i = 0; i < kVec<T>; ++i) elements[i] = from_float<T>(in[i]);
  Packed packed;
  std::memcpy(&packed, elements, 16);
  return packed;
}
template <typename T>
Packed push_front(Packed packed, T element) {
  std::memmove(packed.bytes + sizeof(T), packed.bytes, 16 - sizeof(T));
  std::memcpy(packed.bytes, &element, sizeof(T));
  return packed;
}
template <int kCount>
void keep_packed_until(float, Packed (&)[kCount]) {}

template <typename V>
V* kept_pointer(V* pointer) {
  return pointer;
}

inline float lane_xor(float value, int mask) {
  emulation::Block& block = *emulation::current->block;
  const unsigned thread = threadIdx.x;
  emulation::require(blockDim.x % kWarp == 0, "a shuffle in an incomplete warp");
  emulation::Barrier& warp = block.warps[thread / kWarp];
  block.lanes[thread] = value;
  emulation::wait_at(warp);
  const float other = block.lanes[thread ^ static_cast<unsigned>(mask)];
  emulation::wait_at(warp);
  return other;
}

inline void block_sync() { emulation::wait_at(emulation::current->block->barrier); }

template <typename V>
V* shared_memory() {
  return reinterpret_cast<V*>(emulation::current->block->shared.data());
}

// What is asked for shows only once it has been waited for; until then there is NaN.
inline void copy16_async(void* to, const void* from) {
  require_aligned(to);
  require_aligned(from);
  std::memset(to, 0xff, 16);
  emulation::current->copies.push_back({to, from});
}
inline void prefetch_line(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  bool inside = emulation::readable.empty();
  for (const auto& [begin, end] : emulation::readable) inside |= at >= begin && at < end;
  emulation::require(inside, "a prefetch outside of what is read");
  emulation::prefetched.insert(at / 128);
}
inline void commit_copies() { emulation::current->groups.push_back(std::move(emulation::current->copies)); }
template <int kPending>
void wait_copies() {
  auto& groups = emulation::current->groups;
  for (; groups.size() > kPending; groups.erase(groups.begin())) {
    for (const auto& [to, from] : groups.front()) std::memcpy(to, from, 16);
  }
}

template <typename T>
Packed packed_max(Packed a, Packed b) {
  float of_a[kVec<T>], of_b[kVec<T>];
  unpack<T>(a, of_a);
  unpack<T>(b, of_b);
  for (int i = 0; i < kVec<T>; ++i) of_a[i] = std::fmax(of_a[i], of_b[i]);
  return pack<T>(of_a);
}

}  // namespace fusedmlp
