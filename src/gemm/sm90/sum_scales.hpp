// The scales of A's rows and B's columns for an epilogue that does not leave the sums to CUTLASS's:
// what it sends, and what it adds to, has to be scaled before.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "gemm/sm90/wgmma.hpp"
#include "order/chunking.hpp"
#include "sync/named_barrier.hpp"

namespace agmm {

struct SumScales {
  float const* rows_of_a = nullptr;     // [rows] or [1]
  float const* columns_of_b = nullptr;  // [columns] or [1]
  bool per_row = false;
  bool per_column = false;
  int32_t rows = 0;
  int32_t columns = 0;

  /// Shared memory in which all threads of a tile find the scales of its columns: each by itself
  /// would wait for a load after the other, with no register to have many under way.
  template <int kColumns>
  struct Held {
    alignas(8) float columns[kColumns];
  };

  /// Scales the sums of one of the `kThreads` threads that compute a tile, which begins at that row
  /// and column. The sums are those of kAtomsM x kAtomsN MMAs, [kFloats][kAtomsM][kAtomsN] with the
  /// first index fastest. Rows and columns that only pad the tile, whose sums nobody stores, take
  /// the last ones'.
  template <int kThreads, int kAtomsM, int kAtomsN, int kFloats, int kColumns>
  CUTLASS_DEVICE void multiply(float* sums, Held<kColumns>& held, int32_t first_row,
                               int32_t first_column, int thread) const {
    float* const of_columns = held.columns;
    named_barrier_sync<NamedBarrier::kScalesHeld, kThreads>();  // all have read the last tile's
    CUTLASS_PRAGMA_UNROLL
    for (int column = thread; column < kColumns; column += kThreads) {
      int32_t const of = per_column ? min_of(first_column + column, columns - 1) : 0;
      of_columns[column] = __ldg(columns_of_b + of);
    }
    constexpr int kRows = 2 * kAtomsM;
    float of_rows[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      int32_t const row =
          first_row + fragment_row(thread) + kAtomRows * (kThreads / 128) * (r / 2) + 8 * (r % 2);
      of_rows[r] = __ldg(rows_of_a + (per_row ? min_of(row, rows - 1) : 0));
    }
    named_barrier_sync<NamedBarrier::kScalesHeld, kThreads>();
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kAtomsN; ++n) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFloats; i += 4) {
        int const column = fragment_column(thread) + 2 * kFloats * n + 2 * i;
        float2 const pair = *reinterpret_cast<float2 const*>(of_columns + column);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRows; ++r) {
          float* const two = sums + i + 2 * (r % 2) + kFloats * (r / 2 + kAtomsM * n);
          two[0] *= of_rows[r] * pair.x;
          two[1] *= of_rows[r] * pair.y;
        }
      }
    }
  }
};

/// Stands in the place of SumScales where sums need no scales.
struct NoSumScales {
  template <int>
  struct Held {};
};

}  // namespace agmm
