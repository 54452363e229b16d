// The residual that is added to the sums of a tile in registers.
#pragma once

#include <cstdint>

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "gemm/sm90/wgmma.hpp"

namespace agmm {

/// The rows and columns of a residual [rows, columns] that stand under a tile, which may end beyond
/// both.
template <class Element>
struct ResidualTile {
  Element const* values;
  int32_t rows;
  int32_t columns;  // an even number
  int32_t first_row;
  int32_t first_column;

  /// Brings the tile to L2, while something else is awaited. For all kThreads.
  template <int kThreads, int kTileM, int kTileN>
  CUTLASS_DEVICE void prefetch(int thread) const {
    constexpr int kLine = 128 / int(sizeof(Element));  // elements
    // The number of lines of a row; the last may end in the next tile.
    constexpr int kLines = (kTileN + kLine - 1) / kLine;
    CUTLASS_PRAGMA_UNROLL
    for (int i = thread; i < kTileM * kLines; i += kThreads) {
      int32_t const row = first_row + i / kLines;
      int32_t const column = first_column + i % kLines * kLine;
      if (row >= rows || column >= columns) continue;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(values + int64_t(row) * columns + column));
    }
  }

  /// Adds the tile to sums that lie as FragmentEpilogue says it. For all kThreads, of which each
  /// loads kWords of two elements at a time.
  template <int kWords, int kThreads, int kAtomsM, int kAtomsN, int kFloats>
  CUTLASS_DEVICE void add(float* sums, int thread) const {
    using Two = cutlass::AlignedArray<Element, 2>;
    constexpr int kRows = 2 * kAtomsM;
    constexpr int kSteps = kFloats / 4;
    constexpr int kAtOnce = kWords / kRows < kSteps ? kWords / kRows : kSteps;
    static_assert(kSteps % kAtOnce == 0);
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kAtomsN; ++n) {
      int32_t const from = first_column + fragment_column(thread) + 2 * kFloats * n;
      CUTLASS_PRAGMA_UNROLL
      for (int begin = 0; begin < kSteps; begin += kAtOnce) {
        uint32_t loaded[kAtOnce][kRows];
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRows; ++r) {
          int32_t const row = first_row + fragment_row(thread) +
                              kAtomRows * (kThreads / 128) * (r / 2) + 8 * (r % 2);
          Element const* const of_row = values + int64_t(row) * columns;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kAtOnce; ++i) {
            int32_t const column = from + 8 * (begin + i);
            bool const is_there = row < rows && column < columns;
            loaded[i][r] =
                is_there ? __ldg(reinterpret_cast<unsigned const*>(of_row + column)) : 0u;
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < kRows; ++r) {
            auto const two = reinterpret_cast<Two const&>(loaded[i][r]);
            float* const to =
                sums + 4 * (begin + i) + 2 * (r % 2) + kFloats * (r / 2 + kAtomsM * n);
            to[0] += float(two[0]);
            to[1] += float(two[1]);
          }
        }
      }
    }
  }
};

}  // namespace agmm
