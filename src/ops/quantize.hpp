// Dynamic quantisation of a matrix to fp8, in one launch before its rows are sent.
#pragma once

#include <cstdint>

#include "agmm/problem.hpp"

namespace agmm {

enum class QuantizedFrom { BFloat16, Float16, Float32 };
enum class QuantizedTo { E4M3, E5M2 };
/// What a scale covers: a row, 128 columns of a row, the matrix, or a column.
enum class ScaleOf { Row, Block, Matrix, Column };

constexpr int32_t kQuantizeBlock = kScaleBlock;
/// Of which the columns are a multiple, so that rows begin at 16 bytes.
constexpr int32_t kQuantizeMultiple = 16;

struct Quantize {
  void const* x = nullptr;  // [rows, columns], contiguous, at a multiple of 16 bytes
  QuantizedFrom from = QuantizedFrom::BFloat16;
  QuantizedTo to = QuantizedTo::E4M3;
  ScaleOf scale_of = ScaleOf::Row;
  int64_t rows = 0;
  int32_t columns = 0;
  bool power_of_2 = false;  // round what values are multiplied with down to a power of two
  void* values = nullptr;   // [rows, columns], at a multiple of 16 bytes
  // Of ScaleOf::Column, not 0: values are the transpose, [columns, leading], and what is beyond the
  // rows is zeros. A multiple of 16.
  int64_t leading = 0;
  float* scales = nullptr;  // [rows], [rows, ceil(columns / 128)], [1] or [columns]
  // Of ScaleOf::Matrix and Column: float32 for the largest absolute values, [1] or [columns], here
  // those of x, or where has_amax what is there already (of several matrices that share scales).
  float* amax = nullptr;
  bool has_amax = false;
};

/// Loads the kernels of all that follows on the current device, once; see load_kernels(). Throws
/// std::runtime_error where CUDA refuses.
void load_quantizers();

/// Enqueues it on the current device. Scales are those of agmm.ops.quantize, bit for bit. Throws
/// std::invalid_argument for what does not fit, std::runtime_error where CUDA refuses.
void quantize(Quantize const& args, void* stream);

/// Enqueues the first half of ScaleOf::Matrix or Column, which writes `amax`; of what follows
/// `columns` no other field counts. Throws as quantize().
void find_amax(Quantize const& args, void* stream);

/// Enqueues the transpose of bytes: `x` [rows, columns] to `values` [columns, leading], of the
/// fields of Quantize those count. Throws as quantize().
void transpose_bytes(Quantize const& args, void* stream);

}  // namespace agmm
