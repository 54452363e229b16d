// The scale of fp8 values by their largest one: the arithmetic that every kernel has which
// quantises, with the bits of agmm.ops.quantize.
#pragma once

namespace agmm {

constexpr double kLeastAmax = 1e-12;  // torchao's

/// The larger of two numbers; a NaN counts as the larger one, as in torch.
__device__ inline float max_or_nan(float a, float b) {
  float found;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
  return found;
}

/// What values are multiplied with before they are rounded to a type with this largest number.
/// torch divides a number by a tensor as the number times the reciprocal, each rounded to float64;
/// this does so too, for equal bits.
__device__ inline float fp8_up_of(float amax, float largest, bool power_of_2 = false) {
  double const from = static_cast<double>(amax);
  double const clamped = from < kLeastAmax ? kLeastAmax : from;  // a NaN stays
  auto up = static_cast<float>(__dmul_rn(__drcp_rn(clamped), double(largest)));
  if (power_of_2) up = exp2f(floorf(log2f(up)));
  return up;
}

}  // namespace agmm
