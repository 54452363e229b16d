// Dynamic quantisation of a matrix to fp8, in one launch before its rows are sent.
#pragma once

#include <cstdint>

#include "agmm/problem.hpp"

namespace agmm {

enum class QuantizedFrom { BFloat16, Float16, Float32 };
enum class QuantizedTo { E4M3, E5M2 };
/// What a scale covers: a row, 128 columns of a row, or the matrix.
enum class ScaleOf { Row, Block, Matrix };

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
  float* scales = nullptr;  // [rows], [rows, ceil(columns / 128)] or [1]
  // Of ScaleOf::Matrix: a float32 for the largest absolute value, here that of x, or where has_amax
  // what is there already (of several matrices that share a scale).
  float* amax = nullptr;
  bool has_amax = false;
};

/// Enqueues it on the current device. Scales are those of agmm.ops.quantize, bit for bit. Throws
/// std::invalid_argument for what does not fit, std::runtime_error where CUDA refuses.
void quantize(Quantize const& args, void* stream);

/// Enqueues the first half of ScaleOf::Matrix, which writes `amax`; of what follows `columns` no
/// field counts. Throws as quantize().
void amax_of_matrix(Quantize const& args, void* stream);

}  // namespace agmm
