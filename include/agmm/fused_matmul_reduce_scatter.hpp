// The op out = reduce_scatter(sum of A_i @ B_i) (+ bias), or the all_reduce of that sum: one call
// enqueues everything.
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

/// One product of a call, A [rows, k] row-major @ B [k, n], in device memory that is aligned to 16
/// bytes.
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
  std::vector<Product> products;  // out is their sum; 1 to 3, of fp8 one
  void const* bias = nullptr;     // [n], the dtype of out, added once to the whole sum; or null
  /// [rows / w, n], this rank's rows of what is added to the sum, of an all-reduce too; in the
  /// dtype of out; or null. Operands of 16 bits alone have it.
  void const* residual = nullptr;
  void* out = nullptr;      // [rows / w, out_columns()]; of an all-reduce [rows, ...]
  bool is_average = false;  // the sum is multiplied by 1 / w, before the bias
  /// The number of multiprocessors that the order of an all-reduce's tiles is made for, the same on
  /// all ranks. Where it is not 0 the call is an all-reduce: every rank gets all rows, with the
  /// same bits.
  int32_t all_reduce_sms = 0;
  Accumulation accumulation = Accumulation::Fast;  // Fast or Slow
  KernelConfig config{};
  uint64_t limit_ns = kDefaultLimitNs;  // of each wait; past it the process ends
  /// Where kernels with `timed` write their tiles' times, [w][tiles of a chunk] for each launch; or
  /// null.
  ScatterTimes* tile_times = nullptr;
  Epilogue epilogue = Epilogue::Bias;

  constexpr int32_t out_columns() const { return n / columns_per_out(epilogue); }
};

/// The op on one workspace: symmetric memory of a group of ranks for the sums that they send each
/// other, signals and credits. Safe to call from several threads.
///
/// A partial sum travels rounded once to the dtype of out; one of fp8 products is scaled first. An
/// owner adds the others' partial sums to its own float32 sum, from the rank before it backwards
/// around the ring, then the residual, then the bias, and rounds once. So a config always gives the
/// same bits; another may give others. Where a config splits K, all splits of all tiles have to be
/// one wave of CTAs.
///
/// In an all-reduce a rank computes its own rows a fixed lag behind the other ranks' rows. It sends
/// its rows, once they are finished, to all ranks while the matmul goes on.
class FusedMatmulReduceScatter {
 public:
  /// The `part_bytes` that a workspace needs: the bytes that each rank sends to each other rank at
  /// a time, a multiple of 128. Calls of more than 8192 rows (of A) are computed in several
  /// launches, which bounds it.
  static std::size_t needed_part_bytes(int32_t rows, int32_t n, int world_size,
                                       KernelShape const& shape, bool is_all_reduce = false);
  /// Bytes of symmetric memory that a workspace needs on every rank.
  static std::size_t workspace_bytes(std::size_t part_bytes, int world_size);

  /// Makes memory of workspace_bytes() a workspace of at least 2 ranks, in the way of
  /// FusedAllGatherMatmul::initialise_workspace(). The constructor too takes what
  /// FusedAllGatherMatmul's takes, with part_bytes for slot_bytes.
  static void initialise_workspace(void* memory, std::size_t part_bytes, int world_size,
                                   void* stream);
  FusedMatmulReduceScatter(int rank, std::vector<uintptr_t> const& bases, std::size_t part_bytes,
                           int reserved_sms = 0);
  ~FusedMatmulReduceScatter();
  FusedMatmulReduceScatter(FusedMatmulReduceScatter const&) = delete;
  FusedMatmulReduceScatter& operator=(FusedMatmulReduceScatter const&) = delete;

  std::size_t part_bytes() const;

  /// Enqueues the call. Returns whether the stream is being captured into a graph. Throws what
  /// FusedAllGatherMatmul::operator() throws.
  bool operator()(MatmulScatter const& call, void* stream);

  /// Makes what is enqueued on `stream` from now on wait for the last call: the last eager one, or
  /// the last one of the capture that `stream` is in. Calls of other workspaces of the group need
  /// it.
  void precede(void* stream);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace agmm
