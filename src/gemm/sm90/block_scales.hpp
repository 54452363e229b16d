// The scales of blocks, one for each 128 of K of a row of A, and of 128 columns or of each column
// of B: what the promotion multiplies the sums of a k tile with (promoting_mma.hpp).
//
// The consumers read them, since a thread has few rows: the four lanes of a quad, which have the
// same rows, load one of four k tiles each, and pass on what they have. A's are read from L2, once
// the tile's first k tile has come: its rows have arrived by then, for all of K, since fp8 travels
// in chunks of whole rows (async_input_mainloop.hpp argues the order). The loads wait behind an MMA
// of the same warps; for those of a later one there is no register.
#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "gemm/sm90/wgmma.hpp"
#include "order/chunking.hpp"

namespace agmm {

struct BlockScaleArgs {
  float const* a = nullptr;        // [rows, k_tiles]
  float const* a_local = nullptr;  // those of local_rows
  Range local_rows{};
  float* a_out = nullptr;    // [rows, k_tiles], where all are written, or null
  float const* b = nullptr;  // of k tile k and column or block of columns n: b[k * b_k + n * b_n]
  int32_t b_k = 0;
  int32_t b_n = 0;
  int32_t rows = 0;
  int32_t columns = 0;  // of B
  int32_t k_tiles = 0;
};

/// Where the tile begins that is in the stages from one on; written by the producer, which alone
/// knows.
struct TileStart {
  int32_t row;
  int32_t column;
};

/// Of a thread. A tile has kAtomsM x kAtomsN atoms, MMAs of 64 rows by kColumns columns;
/// kPerColumn: B has a scale for each column, else for 128.
template <int kAtomsM, int kAtomsN, int kColumns, int kWarpgroups, bool kPerColumn>
class BlockScales {
  static constexpr int kGroup = 4;              // k tiles whose scales a quad holds, one each lane
  static constexpr int kRows = 2 * kAtomsM;     // of the thread: 8 apart in an atom
  static constexpr int kFloats = kColumns / 2;  // of the thread, in an atom
  static constexpr int kFactors = kPerColumn ? kFloats : 2;
  static constexpr int kBlocks = kPerColumn ? 1 : kAtomsN;
  static_assert(kPerColumn || kColumns == kScaleBlock);

 public:
  CUTLASS_DEVICE BlockScales(BlockScaleArgs const& args, TileStart const* starts, int thread)
      : args_(args), starts_(starts), thread_(thread) {}

  /// Before any other, once the first k tile is in stage `stage`.
  CUTLASS_DEVICE void begin(int stage) {
    TileStart const start = starts_[stage];
    row_ = start.row + fragment_row(thread_);
    column_ = start.column + (kPerColumn ? fragment_column(thread_) : 0);
  }

  /// The sums of k tile `k`, from 0 on, are being computed.
  CUTLASS_DEVICE void next(int k) {
    k_ = k;
    if (k % kGroup == 0) load(k + lane() % kGroup);
    if constexpr (kPerColumn) bring_near(k + 1);
  }

  /// Those of the sums of an atom, whose layout the MMA has: before these are there.
  CUTLASS_DEVICE void prepare(int m, int n) {
    int const from = (lane() & ~(kGroup - 1)) | (k_ % kGroup);
    float rows[2];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      rows[r] = __shfl_sync(0xffffffffu, held_[2 * m + r][kPerColumn ? 0 : n], from);
    }
    if constexpr (kPerColumn) {
      int const column = column_ + n * kColumns;
      int const left = args_.columns - column;  // a multiple of 8 beyond the thread's own
      float const* const of_k = args_.b + (k_ * args_.columns + column);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFloats; i += 4) {
        float2 of_columns{0, 0};
        if (2 * i < left) of_columns = __ldg(reinterpret_cast<float2 const*>(of_k + 2 * i));
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          factor_[i + 2 * r] = rows[r] * of_columns.x;
          factor_[i + 2 * r + 1] = rows[r] * of_columns.y;
        }
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) factor_[r] = rows[r];
    }
    // Not later, when the MMA has ended and the tensor cores may have nothing to do.
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kFactors; ++i) cute::warpgroup_fence_operand(factor_[i]);
  }

  /// `sum` and what the i-th of the atom's sums adds to it.
  CUTLASS_DEVICE float times(float sum, float part, int i) const {
    return fmaf(part, factor_[kPerColumn ? i : i / 2 % 2], sum);
  }

 private:
  CUTLASS_DEVICE int lane() const { return thread_ % 32; }

  /// B's scales of k tile `k` to L1, from where prepare() reads them: a warp loads one of each 32
  /// bytes, and looks at it when it loads the next ones.
  CUTLASS_DEVICE void bring_near(int k) {
    constexpr int kSector = 32 / sizeof(float);
    static_assert(kAtomsN * kColumns <= 32 * kSector);
    asm volatile("" ::"f"(near_));
    int const in_tile = lane() * kSector;
    int const column = column_ - fragment_column(thread_) + in_tile;
    if (k < args_.k_tiles && in_tile < kAtomsN * kColumns && column < args_.columns) {
      near_ = __ldg(args_.b + k * args_.columns + column);
    }
  }

  /// This lane's part of a group: k tile `k`, which may lie past the last one. All loads are issued
  /// before one is awaited.
  CUTLASS_DEVICE void load(int k) {
    int const k_tile = min_of(k, args_.k_tiles - 1);
    float of_b[kBlocks];
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kBlocks && !kPerColumn; ++n) {
      int const column = min_of(column_ + n * kScaleBlock, args_.columns - 1);
      of_b[n] = __ldg(args_.b + (k_tile * args_.b_k + column / kScaleBlock * args_.b_n));
    }
    float of_a[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      // Rows that only pad the tile, whose sums are not stored, take the last one's.
      int const row = min_of(row_of(r), args_.rows - 1);
      bool const is_local = args_.local_rows.begin <= row && row < args_.local_rows.end;
      float const* const from = is_local ? args_.a_local : args_.a;
      of_a[r] =
          __ldcg(from + ((row - (is_local ? args_.local_rows.begin : 0)) * args_.k_tiles + k_tile));
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < kBlocks; ++n) held_[r][n] = kPerColumn ? of_a[r] : of_a[r] * of_b[n];
    }
    // The tiles of the first columns have all rows.
    if (args_.a_out == nullptr || column_ >= 8 || k != k_tile) return;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (row_of(r) < args_.rows) args_.a_out[row_of(r) * args_.k_tiles + k] = of_a[r];
    }
  }

  CUTLASS_DEVICE int row_of(int r) const {
    return row_ + kAtomRows * kWarpgroups * (r / 2) + 8 * (r % 2);
  }

  BlockScaleArgs const& args_;
  TileStart const* const starts_;
  int const thread_;
  int row_ = 0;  // the thread's first
  int column_ = 0;
  int k_ = 0;
  float held_[kRows][kBlocks];  // of this lane's k tile of the group
  float factor_[kFactors];
  float near_ = 0;
};

}  // namespace agmm
