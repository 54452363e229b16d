// Dynamic quantisation of a matrix to fp8, in one launch before its rows are sent.
#pragma once

#include <cstdint>

#include "agmm/problem.hpp"

namespace agmm {

enum class QuantizedFrom { BFloat16, Float16, Float32 };
enum class QuantizedTo { E4M3, E5M2 };
/// What a scale covers: a row, 128 columns of a row, the matrix, a column, or 128 x 128.
enum class ScaleOf { Row, Block, Matrix, Column, Square };

constexpr int32_t kQuantizeBlock = kScaleBlock;
/// The number of columns is a multiple of this, so that rows begin at multiples of 16 bytes.
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
  // A multiple of 16. With ScaleOf::Column and any but 0, values are the transpose, [columns,
  // leading], with zeros beyond the rows.
  int64_t leading = 0;
  // [rows], [rows, ceil(columns / 128)], [1], [columns] or [ceil(rows / 128), ceil(columns / 128)]
  float* scales = nullptr;
  // The largest absolute values, float32, for ScaleOf::Matrix [1] and Column [columns]. quantize()
  // writes those of x here, or, with has_amax, takes what is here already (that of several matrices
  // which share scales).
  float* amax = nullptr;
  bool has_amax = false;
};

/// Loads the kernels of the functions below on the current device, once; see load_kernels(). Throws
/// std::runtime_error where CUDA refuses.
void load_quantizers();

/// Enqueues the quantisation on the current device. Scales are those of agmm.ops.quantize, bit for
/// bit. Throws std::invalid_argument for what does not fit, std::runtime_error where CUDA refuses.
void quantize(Quantize const& args, void* stream);

/// Enqueues the first half of a quantisation with ScaleOf::Matrix or Column, which writes `amax`;
/// other fields behind `columns` do not count. Throws what quantize() throws.
void find_amax(Quantize const& args, void* stream);

/// Enqueues the transpose of bytes, `x` [rows, columns] to `values` [columns, leading], with zeros
/// beyond the rows; other fields do not count. Throws what quantize() throws.
void transpose_bytes(Quantize const& args, void* stream);

}  // namespace agmm
