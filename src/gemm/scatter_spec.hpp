// The one description of a launch of matmul + reduce-scatter, or + all-reduce.
#pragma once

#include <cstdint>

#include "agmm/fused_matmul_reduce_scatter.hpp"
#include "agmm/problem.hpp"
#include "order/lagged_order.hpp"
#include "transport/tile_push.hpp"

namespace agmm {

struct ScatterSpec {
  static constexpr int kMaxProducts = 3;  // query, key and value

  KernelConfig config{};
  int32_t rows = 0;  // of A
  int32_t n = 0;     // columns of B
  DType dtype = DType::BFloat16;
  BLayout b_layout = BLayout::ColumnMajor;
  Product products[kMaxProducts]{};
  int32_t product_count = 1;
  Accumulation accumulation = Accumulation::Fast;
  void const* bias = nullptr;      // [n] or null
  void const* residual = nullptr;  // as out, or null
  void* out = nullptr;  // [rows of a chunk, out_columns()], where this launch's rows begin
  TilePushArgs push{};
  int32_t sm_count = 0;
  void* split_scratch = nullptr;       // as AsyncInputArgs::split_scratch
  ScatterTimes* tile_times = nullptr;  // of this launch

  // Only a matmul + all-reduce uses out_of_all and lag.
  void* out_of_all =
      nullptr;  // [rows, out_columns()], from where this launch's rows of chunk 0 begin
  Lag lag{};    // the same on all ranks
  Epilogue epilogue = Epilogue::Bias;

  constexpr int32_t out_columns() const { return n / columns_per_out(epilogue); }
};

}  // namespace agmm
