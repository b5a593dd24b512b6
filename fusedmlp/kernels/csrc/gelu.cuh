// GELU's mathematics, once for every kernel. fp32.
//
//   gelu(x) = x * gate(x)      d gelu / dx = gate(x) + x * density(x)      gate(-x) = 1 - gate(x)
//
//   approximate   gate(x)                                                 density(x) = d gate / dx
//   none          (1 + erf(x / sqrt(2))) / 2                              exp(-x^2 / 2) / sqrt(2 pi)
//   tanh          sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 x^3)      gate * (1 - gate) * d(2u)/dx
//
// The gate is computed as its tail gate(-|x|), so that nothing overflows and the small side keeps its relative
// accuracy; 1 - tail serves the other side. Infinities give what the formulas give: gelu(inf) = inf, gelu(-inf) = NaN.
#pragma once

#include "device.cuh"

namespace fusedmlp {

struct Gate {
  float gate;
  float density;
};

// gate(-z) / exp(-z^2 / 2) of the erf form, for z >= 0: Mills' ratio over sqrt(2 pi).
//
// A minimax polynomial in z / (1 + z / 4): relative error 1e-7 up to z = 5, growing to 1.5e-5 at z = 13, where the tail
// is the smallest normal fp32. Half the instructions of erff, and exp(-z^2 / 2) is the density that the gradient needs.
__device__ __forceinline__ float mills(float z) {
  // Beyond 16 the tail is 0 in fp32; the bound keeps inf / inf away.
  z = fminf(z, 16.0f);
  // The square of a reciprocal root costs less than a division.
  const float root = rsqrt_approx(fmaf(z, 0.25f, 1.0f));
  const float u = z * root * root;
  float p = fmaf(u, 6.004288479743991e-06f, -7.671614730497822e-05f);
  p = fmaf(p, u, 0.00014915138308424503f);
  p = fmaf(p, u, 0.0033591382671147585f);
  p = fmaf(p, u, -0.032889679074287415f);
  p = fmaf(p, u, 0.15025855600833893f);
  p = fmaf(p, u, -0.3989419639110565f);
  return fmaf(p, u, 0.5f);
}

// What a caller does not use of the result, the compiler drops.
template <bool kTanh>
__device__ __forceinline__ Gate gate_and_density(float x) {
  float tail, density;
  if constexpr (kTanh) {
    // e^(-2|u|) = 2^(|x| * (linear + cubic * x^2))
    const float e = exp2_approx(fabsf(x) * fmaf(x * x, -0.10294323958002349f, -2.302208198144325f));
    const float root = rsqrt_approx(e + 1.0f);
    tail = e * (root * root);
    density = tail * (1.0f - tail) * fmaf(x * x, 0.21406444881780074f, 1.5957691216057308f);
  } else {
    const float bell = exp2_approx(x * x * -0.7213475204444817f);
    tail = bell * mills(fabsf(x));
    density = bell * 0.3989422804014327f;
  }
  return {x < 0.0f ? tail : 1.0f - tail, density};
}

template <bool kTanh>
__device__ __forceinline__ float gelu(float x) {
  return x * gate_and_density<kTanh>(x).gate;
}

// d gelu / dx
template <bool kTanh>
__device__ __forceinline__ float gelu_grad(float x) {
  const Gate g = gate_and_density<kTanh>(x);
  return fmaf(x, g.density, g.gate);
}

}  // namespace fusedmlp
