// out = reduce_scatter(sum of A_i @ B_i) (+ bias), or all_reduce of it, one call that enqueues
// everything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "agmm/async_input_mm.hpp"
#include "agmm/limits.hpp"
#include "agmm/problem.hpp"

namespace agmm {

struct ScatterTimes;

/// A [rows, k] row-major @ B [k, n]: device memory, aligned to 16 bytes.
struct Product {
  void const* a = nullptr;
  int64_t lda = 0;  // elements between rows of A
  void const* b = nullptr;
  int64_t ldb = 0;  // elements between rows (RowMajor) or columns (ColumnMajor) of B
  int32_t k = 0;
  Scales scales{};  // of fp8: this rank's own, for all rows of A and for the columns of B
};

/// What a call of w ranks computes: rank r gets rows [r, r + 1) * rows / w of the sum over all
/// ranks.
struct MatmulScatter {
  int32_t rows = 0;  // of A on each rank; a multiple of w
  int32_t n = 0;
  DType dtype = DType::BFloat16;
  BLayout b_layout = BLayout::ColumnMajor;
  std::vector<Product> products;  // their sum; 1 to 3, of fp8 one
  void const* bias = nullptr;     // [n], the dtype of out, added once to the whole sum; or null
  void* out = nullptr;            // [rows / w, out_columns()], of an all-reduce of all rows
  bool is_average = false;        // the sum is multiplied by 1 / w, before the bias
  /// Where not 0, every rank gets all rows, with the same bits: an all-reduce. Then this is the
  /// same on all ranks: the multiprocessors that the order of the tiles is made for.
  int32_t all_reduce_sms = 0;
  Accumulation accumulation = Accumulation::Fast;  // Fast or Slow
  KernelConfig config{};
  uint64_t limit_ns = kDefaultLimitNs;  // of each wait; past it the process ends
  /// For kernels with `timed`: of each launch [w][tiles of a chunk]; or null.
  ScatterTimes* tile_times = nullptr;
  Epilogue epilogue = Epilogue::Bias;

  constexpr int32_t out_columns() const { return n / columns_per_out(epilogue); }
};

/// The op on one workspace: symmetric memory of a group of ranks for the sums that they send each
/// other, signals and credits. Safe to call from several threads.
///
/// Sums travel rounded once to the dtype of out, those of fp8 products scaled; an owner adds them
/// to its own float32 sum, from the rank before it backwards around the ring, then the bias, and
/// rounds once. So a config always gives the same bits; another may give others. Where a config
/// splits K, all parts of all tiles have to be one wave of CTAs.
///
/// An all-reduce computes a rank's own rows a lag behind the others and sends them, once they are
/// whole, to all ranks, while the matmul goes on.
class FusedMatmulReduceScatter {
 public:
  /// Bytes that each rank sends to each other one at a time, a workspace's `part_bytes`. A multiple
  /// of 128. Calls of more than 8192 rows (of A) are computed in several launches, which bounds it.
  static std::size_t needed_part_bytes(int32_t rows, int32_t n, int world_size,
                                       KernelShape const& shape, bool is_all_reduce = false);
  /// Bytes of symmetric memory that a workspace needs on every rank.
  static std::size_t workspace_bytes(std::size_t part_bytes, int world_size);

  /// As FusedAllGatherMatmul's, for at least 2 ranks.
  static void initialise_workspace(void* memory, std::size_t part_bytes, int world_size,
                                   void* stream);
  FusedMatmulReduceScatter(int rank, std::vector<uintptr_t> const& bases, std::size_t part_bytes,
                           int reserved_sms = 0);
  ~FusedMatmulReduceScatter();
  FusedMatmulReduceScatter(FusedMatmulReduceScatter const&) = delete;
  FusedMatmulReduceScatter& operator=(FusedMatmulReduceScatter const&) = delete;

  std::size_t part_bytes() const;

  /// Returns whether the stream is being captured into a graph. Throws as FusedAllGatherMatmul.
  bool operator()(MatmulScatter const& call, void* stream);

  /// What is enqueued on `stream` from now on comes behind the last call: the last eager one, or
  /// that of the capture that `stream` is in. For calls of other workspaces of the group.
  void precede(void* stream);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace agmm
