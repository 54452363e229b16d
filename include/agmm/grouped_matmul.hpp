// The matmul of rows that are grouped by expert, each expert's with its own matrix. How many rows
// an expert has is known on the device alone.
#pragma once

#include <cstdint>

#include "agmm/fields.hpp"
#include "agmm/limits.hpp"
#include "agmm/problem.hpp"

namespace agmm {

/// The scales of fp8 matrices in float32, elements between neighbours along experts, K and columns.
/// A scale is of so many columns: of 1 for all of K, where stride_k is 0, or of kScaleBlock for as
/// many of K.
struct ExpertScales {
  float const* at = nullptr;
  int64_t stride_expert = 0;
  int64_t stride_k = 0;
  int64_t stride_n = 0;
  int32_t columns = 1;
};
AGMM_FIELDS(ExpertScales, at, stride_expert, stride_k, stride_n, columns);

/// The scales of fp8 rows in float32: stride_k is 0 where a row has one scale, else each
/// kScaleBlock of K have one.
struct RowsScales {
  float const* at = nullptr;
  int64_t stride_row = 0;
  int64_t stride_k = 0;
};
AGMM_FIELDS(RowsScales, at, stride_row, stride_k);

/// A weight: one matrix [k, columns] for each expert, and perhaps a bias.
struct ExpertWeight {
  void const* b = nullptr;     // of the first expert
  int64_t ldb = 0;             // elements between rows (RowMajor) or columns (ColumnMajor)
  int64_t expert_stride = 0;   // elements from an expert's matrix to the next one's
  void const* bias = nullptr;  // [experts, columns], the dtype of out; or null
  ExpertScales scales{};       // of fp8
};
AGMM_FIELDS(ExpertWeight, b, ldb, expert_stride, bias, scales);

/// How the kernel sees that rows of A, which are still on their way, have come. The rows of an
/// expert lie by the rank that they come from.
struct RowArrival {
  // [sources * experts], device memory: how many rows of an expert have come from a source, added
  // with release semantics at system scope after the rows. Each is 0 before the first row comes,
  // and back at 0 before the next launch, for which the caller cares. Null: all rows are there.
  uint32_t const* arrived = nullptr;
  int32_t const* begins = nullptr;  // [experts * sources]: the first row of a source, by expert
  int32_t sources = 0;
  int32_t first_source = 0;  // whose rows come first; tiles that hold them are computed first
  int32_t rank = 0;          // for the message when a wait passes its limit
  uint64_t limit_ns = kDefaultLimitNs;
};
AGMM_FIELDS(RowArrival, arrived, begins, sources, first_source, rank, limit_ns);

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
  RowsScales scales{};  // of fp8, which come with their rows
  // [experts + 1]: the rows of expert e are those from offsets[e] to offsets[e + 1]. The first is
  // 0. The kernel reads them when it runs; wrong ones give wrong results, but touch no other
  // memory.
  int32_t const* offsets = nullptr;
  RowArrival arrival{};
  // Whether the kernel starts as soon as all CTAs of the kernel ahead in the stream run, where that
  // is the one that brings the rows (RowArrival).
  bool starts_early = false;
  bool clears_rest = true;  // whether the rows behind the last expert's become 0
  ExpertWeight weight{};
  ExpertWeight up{};  // of Epilogue::Gate alone
  void* out = nullptr;
  int32_t sm_count = 0;  // CTAs at most; 0, or more than that: the device's SMs
};
AGMM_FIELDS(GroupedMatmul, shape, dtype, b_layout, epilogue, activation, rows, out_columns, k,
            experts, a, lda, scales, offsets, arrival, starts_early, clears_rest, weight, up, out,
            sm_count);

/// Enqueues it on a stream of the current device. The first call with a kernel loads that, which
/// waits for the device. Throws std::invalid_argument where the problem is
/// not legal for the kernel or the kernel is not in this build, std::runtime_error where this build
/// has none for the device, or when CUDA refuses.
void grouped_matmul(GroupedMatmul const& args, void* stream);

}  // namespace agmm
