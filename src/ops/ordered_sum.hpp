// The sum of what the ranks have sent to one of them, added up in the order of the ranks.
#pragma once

#include <cstdint>

namespace agmm {

/// The element types of partial sums.
enum class SummedElement { BFloat16, Float16, Float32, Float64 };

/// A sum of matrices [rows, columns], of which each is contiguous. Numbers are added up in float32
/// (float64 for float64), beginning with the first matrix, then divided, then the bias and the
/// residual are added, and the result is rounded once. So its bits are those of the CPU backend's
/// sum of the same numbers, on every GPU and for every number of CTAs.
struct OrderedSum {
  void const* partials = nullptr;
  int64_t stride = 0;  // bytes from one matrix to the next
  SummedElement element = SummedElement::BFloat16;
  int32_t count = 0;
  int64_t rows = 0;
  int32_t columns = 0;
  int32_t divisor = 1;
  void const* bias = nullptr;      // [columns], of the same type, or null
  void const* residual = nullptr;  // [rows, columns], of the same type, contiguous, or null
  void* out = nullptr;             // [rows, columns], contiguous
  bool is_wide = false;            // whether `out` is float32 (float64 for float64)
};

/// Loads the kernels of ordered_sum() on the current device, once; see load_kernels(). Throws
/// std::runtime_error where CUDA refuses.
void load_ordered_sums();

/// Enqueues the sum on the current device. Throws std::invalid_argument for what does not fit,
/// std::runtime_error where CUDA refuses.
void ordered_sum(OrderedSum const& args, void* stream);

}  // namespace agmm
