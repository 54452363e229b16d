// Arithmetic of the RMS norm of a row that some threads share, each with some groups of it.
#pragma once

#include "cutlass/cutlass.h"

namespace agmm {

/// The sum over the lanes of a warp, added up in the same order in every call, in each of them.
CUTLASS_DEVICE float sum_of_warp(float value) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = cutlass::NumThreadsPerWarp / 2; i > 0; i /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, i);
  }
  return value;
}

template <class Values>
CUTLASS_DEVICE float sum_of_squares(Values const& values) {
  float sum = 0;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < int(Values::kElements); ++i) sum += values[i] * values[i];
  return sum;
}

/// What values are multiplied with beside the norm's weight. `squares`: the sum over a row.
CUTLASS_DEVICE float norm_scale(float squares, int32_t row_elements, float eps) {
  return rsqrtf(squares / float(row_elements) + eps);
}

/// Multiplies values by the scale of their row and the norm's weight.
template <class Values>
CUTLASS_DEVICE void apply_norm(Values& values, float scale, Values const& weight) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < int(Values::kElements); ++i) values[i] = values[i] * scale * weight[i];
}

}  // namespace agmm
