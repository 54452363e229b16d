// A bias for an epilogue that sends whole sums: what it sends has to have it, as what it stores.
#pragma once

#include <cstdint>

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "gemm/sm90/wgmma.hpp"

namespace agmm {

template <class Element>
struct SumBias {
  Element const* bias = nullptr;  // [columns] or null
  int32_t columns = 0;            // an even number

  /// Adds the bias to a thread's sums, laid out as in SumScales::multiply().
  template <int kAtomsM, int kAtomsN, int kFloats>
  CUTLASS_DEVICE void add(float* sums, int32_t first_column, int thread) const {
    if (bias == nullptr) return;
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kAtomsN; ++n) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFloats; i += 4) {
        int32_t const column = first_column + fragment_column(thread) + 2 * kFloats * n + 2 * i;
        if (column >= columns) continue;  // only pads the tile
        auto const of_columns =
            *reinterpret_cast<cutlass::AlignedArray<Element, 2> const*>(bias + column);
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 2; ++c) {
          float const of_column = float(of_columns[c]);
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < 2 * kAtomsM; ++r) {
            sums[i + 2 * (r % 2) + c + kFloats * (r / 2 + kAtomsM * n)] += of_column;
          }
        }
      }
    }
  }
};

/// Stands in the place of SumBias where CUTLASS's epilogue adds the bias.
struct NoSumBias {};

}  // namespace agmm
