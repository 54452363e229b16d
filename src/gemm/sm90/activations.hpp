// The activations of epilogues: functions of one float32 sum, of which the caller chooses one when
// the kernel runs. Each is within 2e-5 of the exact value, relative to it, tails included, and has
// torch's NaN, infinities and signs of 0.
#pragma once

#include "agmm/problem.hpp"
#include "cutlass/cutlass.h"

namespace agmm {

namespace activation_detail {

// Both flush results below 2^-126 to 0. Of sigmoids the exponential is multiplied in as two halves,
// so that what is flushed would round to 0 anyway. That of gelu is not, for which cooperative
// kernels have no register: results below 4e-39 become 0 there, as torch's do below 1e-7.
CUTLASS_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
CUTLASS_DEVICE float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2E = 1.4426950408889634f;

/// x / (1 + exp(-v)), for a v of the sign of x. The exponential is that of -|v|, which does not
/// overflow: exp(88.8) would, where the quotient is no 0 yet.
CUTLASS_DEVICE float times_sigmoid(float x, float v) {
  float const half = exp2_of(-0.5f * kLog2E * fabsf(v));  // its square is exp(-|v|)
  float const factor = v < 0 ? half : 1.0f;
  return x * factor * factor * reciprocal(1.0f + half * half);
}

}  // namespace activation_detail

/// The function of an activation.
template <Activation kActivation>
CUTLASS_DEVICE float activated(float x) {
  using namespace activation_detail;
  if constexpr (kActivation == Activation::Relu || kActivation == Activation::Relu2) {
    float positive;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(positive) : "f"(x));
    return kActivation == Activation::Relu ? positive : positive * positive;
  } else if constexpr (kActivation == Activation::Silu) {
    return times_sigmoid(x, x);
  } else if constexpr (kActivation == Activation::GeluTanh) {
    // x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3).
    constexpr float kTwice = 1.5957691216057308f;
    return times_sigmoid(x, x * (kTwice + kTwice * 0.044715f * (x * x)));
  } else {
    // x * Phi(x), where Phi(-|x|) = t * P(t) * exp(-x^2 / 2), t = 1 / (1 + p |x|). P is the
    // polynomial of degree 6 with the least relative error for |x| up to 14, found by weighted
    // least squares for each p in steps of 0.01; with p = 0.36 that error is 9e-7.
    static_assert(kActivation == Activation::Gelu);
    constexpr float kCoefficients[] = {
        0.14371304214000702f, 0.14177249372005463f,  0.13971903920173645f, 0.026549993082880974f,
        0.1809529960155487f,  -0.17976391315460205f, 0.047056060284376144f};
    float const t = reciprocal(1.0f + 0.36f * fabsf(x));
    float sum = kCoefficients[6];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 5; i >= 0; --i) sum = sum * t + kCoefficients[i];
    float const tail = sum * t * exp2_of(-0.5f * kLog2E * (x * x));
    return x * (x < 0 ? tail : 1.0f - tail);
  }
}

template <Activation kActivation>
struct ActivationConstant {
  static constexpr Activation value = kActivation;
};

/// Calls `body` with the ActivationConstant of an activation, so that its loops hold no choice.
template <class Body>
CUTLASS_DEVICE void with_activation(Activation activation, Body const& body) {
  if (activation == Activation::Silu) {
    body(ActivationConstant<Activation::Silu>{});
  } else if (activation == Activation::GeluTanh) {
    body(ActivationConstant<Activation::GeluTanh>{});
  } else if (activation == Activation::Gelu) {
    body(ActivationConstant<Activation::Gelu>{});
  } else if (activation == Activation::Relu2) {
    body(ActivationConstant<Activation::Relu2>{});
  } else {
    body(ActivationConstant<Activation::Relu>{});
  }
}

}  // namespace agmm
