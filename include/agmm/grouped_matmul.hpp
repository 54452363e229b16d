// The matmul of rows that are grouped by expert, each expert's with its own matrix. How many rows
// an expert has is known on the device alone.
#pragma once

#include <cstdint>

#include "agmm/fields.hpp"
#include "agmm/problem.hpp"

namespace agmm {

/// A weight: one matrix [k, columns] for each expert, and perhaps a bias.
struct ExpertWeight {
  void const* b = nullptr;     // of the first expert
  int64_t ldb = 0;             // elements between rows (RowMajor) or columns (ColumnMajor)
  int64_t expert_stride = 0;   // elements from an expert's matrix to the next one's
  void const* bias = nullptr;  // [experts, columns], the dtype of out; or null
};
AGMM_FIELDS(ExpertWeight, b, ldb, expert_stride, bias);

/// out[row] = epilogue(A[row] @ B of the row's expert), and zeros behind the last expert's rows.
/// All pointers are device memory, aligned to 16 bytes; out has leading dimension out_columns.
struct GroupedMatmul {
  KernelShape shape{};
  DType dtype = DType::BFloat16;
  BLayout b_layout = BLayout::ColumnMajor;
  Epilogue epilogue = Epilogue::Bias;  // or Gate, of two weights
  Activation activation = Activation::Relu;
  int32_t rows = 0;  // that A and out have room for
  int32_t out_columns = 0;
  int32_t k = 0;
  int32_t experts = 0;
  void const* a = nullptr;  // [rows, k]
  int64_t lda = 0;
  // [experts + 1]: the rows of expert e are those from offsets[e] to offsets[e + 1]. The first is
  // 0. The kernel reads them when it runs; wrong ones give wrong results, but touch no other
  // memory.
  int32_t const* offsets = nullptr;
  ExpertWeight weight{};
  ExpertWeight up{};  // of Epilogue::Gate alone
  void* out = nullptr;
  int32_t sm_count = 0;  // CTAs at most; 0, or more than that: the device's SMs
};
AGMM_FIELDS(GroupedMatmul, shape, dtype, b_layout, epilogue, activation, rows, out_columns, k,
            experts, a, lda, offsets, weight, up, out, sm_count);

/// Loads every kernel for grouped matmuls on the current device, as load_kernels() does.
void load_grouped_kernels();

/// Enqueues it on a stream of the current device. Throws std::invalid_argument where the problem is
/// not legal for the kernel or the kernel is not in this build, std::runtime_error where this build
/// has none for the device, or when CUDA refuses.
void grouped_matmul(GroupedMatmul const& args, void* stream);

}  // namespace agmm
