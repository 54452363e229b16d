// The scales of blocks in a streaming kernel: they come to the stage of the ring that has the 128
// of K which they scale, and the sums of that stage are multiplied with them as they are promoted.
//
// A's scales come with its rows, so the warp that loads A copies them, behind the gate of these
// rows (fp8 travels in chunks of whole rows, so all of a row's scales have come with its signal).
// All its lanes copy, 4 bytes at a time, and each arrives at the stage's `full` when its copies are
// there. The copies are the generic proxy's: the acquire that allowed them is enough, and a warp
// that reads the scales before it gives a stage back has read them before they are written anew.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "gemm/sm90/block_scales.hpp"
#include "gemm/sm90/wgmma.hpp"
#include "order/chunking.hpp"
#include "sync/copy_async.hpp"

namespace agmm {

/// The scales of one stage. kPerColumn: B has a scale for each column, else for 128, and a tile's
/// columns are those of one scale block.
template <int kTileM, int kTileN, bool kPerColumn>
struct StageScales {
  static constexpr int kColumns = kPerColumn ? kTileN : 1;
  static_assert(kPerColumn || kScaleBlock % kTileN == 0);
  // A thread reads two of them at once, in every stage of the ring.
  alignas(16) float rows[kTileM];
  float columns[kColumns];

  /// Copies the scales of k tile `k`, by all lanes of a warp, each of which arrives at `full`. Rows
  /// and columns that only pad the tile get 0.
  CUTLASS_DEVICE void load(BlockScaleArgs const& args, Range const& tile_rows, int32_t column,
                           int32_t k, uint64_t* full) {
    int const lane = int(threadIdx.x) % cutlass::NumThreadsPerWarp;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTileM; i += cutlass::NumThreadsPerWarp) {
      if (kTileM % cutlass::NumThreadsPerWarp != 0 && i + lane >= kTileM) break;
      int32_t const row = min_of(tile_rows.begin + i + lane, args.rows - 1);
      bool const is_local = args.local_rows.begin <= row && row < args.local_rows.end;
      float const* const from =
          is_local ? args.a_local + ((row - args.local_rows.begin) * args.k_tiles + k)
                   : args.a + (row * args.k_tiles + k);
      bool const is_row = i + lane < tile_rows.size();
      copy_async(&rows[i + lane], from, is_row);
      // The tiles of the first columns have all rows.
      if (args.a_out != nullptr && column == 0 && is_row) {
        args.a_out[row * args.k_tiles + k] = __ldcg(from);
      }
    }
    if constexpr (kPerColumn) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTileN; i += cutlass::NumThreadsPerWarp) {
        int32_t const at = min_of(column + i + lane, args.columns - 1);
        copy_async(&columns[i + lane], args.b + (int64_t(k) * args.columns + at),
                   column + i + lane < args.columns);
      }
    } else if (lane == 0) {
      copy_async(&columns[0],
                 args.b + (int64_t(k) * args.b_k + int64_t(column / kScaleBlock) * args.b_n), true);
    }
    arrive_when_copied(full);
  }
};

/// The scales of a thread's sums of a stage: its rows of out are columns of the wgmma.
template <int kTileM, int kTileN, bool kPerColumn>
class StageFactors {
  static constexpr int kAtoms = kTileN / kAtomRows;

 public:
  CUTLASS_DEVICE explicit StageFactors(StageScales<kTileM, kTileN, kPerColumn> const& scales) {
    auto const thread = int(threadIdx.x);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTileM / 4; i += 2) {
      auto const two =
          *reinterpret_cast<float2 const*>(&scales.rows[fragment_column(thread) + 4 * i]);
      rows_[i] = two.x;
      rows_[i + 1] = two.y;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      columns_[i] = scales.columns[kPerColumn ? fragment_row(thread) + 8 * i + 48 * (i / 2) : 0];
    }
  }

  /// `sum` and what the i-th of an atom's sums adds to it.
  CUTLASS_DEVICE float times(float sum, float part, int atom, int i) const {
    float const of_column = columns_[kPerColumn ? 2 * atom + i / 2 % 2 : 0];
    return fmaf(part, rows_[i / 4 * 2 + i % 2] * of_column, sum);
  }

 private:
  static constexpr int kColumns = kPerColumn ? 2 * kAtoms : 1;
  float rows_[kTileM / 4];
  float columns_[kColumns];
};

}  // namespace agmm
