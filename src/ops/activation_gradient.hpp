// The gradient through an activation, as one pass over memory.
#pragma once

#include <cstdint>

#include "agmm/problem.hpp"
#include "ops/quantize.hpp"

namespace agmm {

/// A matrix whose rows are contiguous, at multiples of 16 bytes. Null at `at`: there is none.
struct Rows {
  void* at = nullptr;
  int64_t stride = 0;  // elements from one row to the next
};

/// The gradients of products with their biases, for that of the activation's result. With `up` the
/// activation is gated: the result is activation(gate) * up. Each gradient is computed in float32,
/// by torch's formulas and so with torch's NaN, infinities and signs of 0, and rounded once.
struct ActivationGradient {
  Activation activation = Activation::Silu;
  DType dtype = DType::BFloat16;  // of all matrices, 16 bits
  int64_t rows = 0;
  int32_t columns = 0;  // a multiple of kGradientMultiple
  Rows grad_out;
  Rows gate;  // without `up`: the only products
  Rows up;
  Rows grad_gate;
  Rows grad_up;
  // Both gradients side by side in fp8, [rows, 2 * columns], contiguous, or null. They are those of
  // quantize() of the rounded gradients, bit for bit. Only with `up`, and with a scale for each row
  // (ScaleOf::Row, at most kMostQuantizedColumns) or each 128 columns (ScaleOf::Block, columns a
  // multiple of 128).
  void* values = nullptr;
  float* scales = nullptr;  // [rows], or [rows, 2 * columns / 128]
  QuantizedTo to = QuantizedTo::E4M3;
  ScaleOf scale_of = ScaleOf::Row;
  bool power_of_2 = false;
};

/// Columns and strides are multiples of this: a thread reads 16 bytes at once.
constexpr int32_t kGradientMultiple = 8;
/// The registers of a CTA hold no longer rows of both gradients between their largest value and
/// their conversion.
constexpr int32_t kMostQuantizedColumns = 16384;

/// Loads the kernels of activation_gradient() on the current device, once; see load_kernels().
/// Throws std::runtime_error where CUDA refuses.
void load_activation_gradients();

/// Enqueues the computation on the current device. Throws std::invalid_argument for what does not
/// fit, std::runtime_error where CUDA refuses.
void activation_gradient(ActivationGradient const& args, void* stream);

}  // namespace agmm
