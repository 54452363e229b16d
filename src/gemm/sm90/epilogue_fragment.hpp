// The epilogue policy for an epilogue that does not leave the sums to CUTLASS's: what it sends, and
// what it adds to, has to be scaled before, and where it sends whole sums, they have to be
// finished.
#pragma once

#include <cstdint>

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "gemm/sm90/epilogue_policy.hpp"
#include "gemm/sm90/wgmma.hpp"
#include "order/chunking.hpp"
#include "sync/named_barrier.hpp"

namespace agmm {

/// Works on the sums of one of the `kThreads` threads that compute a tile. They are those of
/// kAtomsM x kAtomsN MMAs, [kFloats][kAtomsM][kAtomsN] with the first index fastest.
template <class Policy>
struct FragmentEpilogue {
  typename Policy::Args args{};
  int32_t rows = 0;     // of A
  int32_t columns = 0;  // of B, an even number

  /// Shared memory in which all threads of a tile find the scales of its columns: each by itself
  /// would wait for a load after the other, with no register to have many under way.
  template <int kColumns>
  struct HeldScales {
    alignas(8) float columns[kColumns];
  };
  /// Stands in its place where sums need no scales.
  struct NoScales {};
  template <int kColumns>
  using Held = cute::conditional_t<Policy::kScaled, HeldScales<kColumns>, NoScales>;

  /// Scales the sums of a tile that begins at that row and column. Rows and columns that only pad
  /// the tile, whose sums nobody stores, take the last ones'. No kernel writes the scales while
  /// this one runs.
  template <int kThreads, int kAtomsM, int kAtomsN, int kFloats, int kColumns>
  CUTLASS_DEVICE void scale(float* sums, HeldScales<kColumns>& held, int32_t first_row,
                            int32_t first_column, int thread) const {
    ColumnScaleArgs const& scales = args.column_scales;
    float* const of_columns = held.columns;
    named_barrier_sync<NamedBarrier::kScalesHeld, kThreads>();  // all have read the last tile's
    CUTLASS_PRAGMA_UNROLL
    for (int column = thread; column < kColumns; column += kThreads) {
      int32_t const of = scales.is_per_column ? min_of(first_column + column, columns - 1) : 0;
      of_columns[column] = __ldg(scales.scales + of);
    }
    constexpr int kRows = 2 * kAtomsM;
    float of_rows[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      int32_t const row =
          first_row + fragment_row(thread) + kAtomRows * (kThreads / 128) * (r / 2) + 8 * (r % 2);
      int32_t const of = args.row_scales.is_per_row ? min_of(row, rows - 1) : 0;
      of_rows[r] = __ldg(args.row_scales.scales + of);
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
          two[0] = Policy::scale_part(two[0], of_rows[r], pair.x);
          two[1] = Policy::scale_part(two[1], of_rows[r], pair.y);
        }
      }
    }
  }

  /// Finishes the sums of a tile that begins at that column. Without a bias -0 is added, which
  /// keeps a sum of -0.
  template <int kAtomsM, int kAtomsN, int kFloats>
  CUTLASS_DEVICE void finish(float* sums, int32_t first_column, int thread) const {
    static_assert(Policy::kColumnsPerOut == 1, "what comes of a sum has the sum's place");
    using Out = typename Policy::Out;
    if (Policy::Math::kKeepsSums && args.bias == nullptr) return;
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kAtomsN; ++n) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFloats; i += 4) {
        int32_t const column = first_column + fragment_column(thread) + 2 * kFloats * n + 2 * i;
        if (column >= columns) continue;  // only pads the tile
        Floats<2> bias;
        bias.fill(-0.0f);
        if (Policy::Math::kKeepsSums || args.bias != nullptr) {
          auto const of_columns =
              *reinterpret_cast<cutlass::AlignedArray<Out, 2> const*>(args.bias + column);
          bias[0] = float(of_columns[0]);
          bias[1] = float(of_columns[1]);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2 * kAtomsM; ++r) {
          float* const two = sums + i + 2 * (r % 2) + kFloats * (r / 2 + kAtomsM * n);
          Floats<2> whole;
          whole[0] = two[0];
          whole[1] = two[1];
          Floats<2> const finished = Policy::Math::finish(whole, bias, args);
          two[0] = finished[0];
          two[1] = finished[1];
        }
      }
    }
  }
};

}  // namespace agmm
