// What goes with the columns of a tile, such as scales or a bias, for epilogues that hold their
// sums as WGMMA leaves them.
#pragma once

#include <cstdint>
#include <cstring>

#include "cutlass/cutlass.h"

namespace agmm {

/// What two neighbouring columns have, for kColumns columns of a tile. Of each eight columns a
/// thread needs one pair, and so do the seven others of its warp that have the same columns in
/// other rows. The lanes read different pairs, all at once, and hand them to one another: a thread
/// that read its own would wait for L2 once for each eight columns, with no register to have more
/// under way.
template <class Pair, int kColumns>
class ColumnPairs {
 public:
  /// `read(column)` returns the pair that begins at that column of the tile, also where the tile
  /// has no such column. All lanes of a warp come here, and to of(), together.
  template <class Read>
  CUTLASS_DEVICE ColumnPairs(int thread, Read const& read) : lane_(thread % kLanes) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kHeld; ++i) held_[i] = read(2 * (kLanes * i + lane_));
  }

  /// The thread's pair of eight columns: it begins at fragment_column(thread) of them.
  CUTLASS_DEVICE Pair of(int eight) const {
    int const from = 4 * (eight % 8) + lane_ % 4;
    uint32_t words[kWords];
    std::memcpy(words, &held_[eight / 8], sizeof(Pair));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWords; ++i) words[i] = __shfl_sync(0xffffffff, words[i], from);
    Pair pair;
    std::memcpy(&pair, words, sizeof(Pair));
    return pair;
  }

 private:
  static constexpr int kLanes = 32;
  static constexpr int kHeld = (kColumns + 2 * kLanes - 1) / (2 * kLanes);
  static constexpr int kWords = sizeof(Pair) / sizeof(uint32_t);
  static_assert(kColumns % 8 == 0 && sizeof(Pair) % sizeof(uint32_t) == 0);

  Pair held_[kHeld];
  int lane_;
};

}  // namespace agmm
