// Stores what a producer warp has loaded: the gathered operand, where the caller wants it.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/cutlass.h"
#include "order/chunking.hpp"

namespace agmm {

/// The tiles of one row of tiles all load the same rows; each stores its share of the k tiles,
/// since the stores of all of them by one column of tiles do not keep up with its loads. Only the
/// next k tile to store is kept: where the producer's step is longer than a stage's MMAs, as it
/// soon is with small tiles, it is what bounds the kernel.
///
/// For the lane that issues. `Store`, called with a stage's index and a k tile: issues the TMA
/// store of what the stage holds. Without kEnabled nothing is left of it.
template <bool kEnabled, int kStages, class Store>
class StageStore {
 public:
  /// `tiles`: that share the rows, of which this is number `tile`.
  CUTLASS_DEVICE StageStore(bool stores, FastDiv const& tiles, int tile, int k_begin,
                            Store const& store)
      : stores_(kEnabled && stores), tiles_(tiles), store_(store) {
    if (stores_) {
      int const ahead = tile - tiles.remainder(k_begin);
      next_ = k_begin + (ahead < 0 ? ahead + tiles.divisor : ahead);
    }
  }

  /// The stage has been acquired for this k tile: what it still holds has landed, since it has been
  /// consumed. Stores that where it is in the share; then wait() has to come before the load that
  /// overwrites it. The other stages keep the consumers busy meanwhile.
  CUTLASS_DEVICE bool before_refill(int stage, int k_tile) {
    bool const is_stored = kEnabled && k_tile - kStages == next_;
    if (is_stored) {
      store_(stage, next_);
      next_ += tiles_.divisor;
    }
    return is_stored;
  }

  /// Waits until the stores have read the stages.
  CUTLASS_DEVICE static void wait() { cute::tma_store_wait<0>(); }

  /// What the stages hold when the last k tile has been sent for. `stage` is the next to fill; it
  /// makes a turn of the ring where anything is stored. `await_full(stage)`: until it has landed.
  template <class Stage, class AwaitFull>
  CUTLASS_DEVICE void finish(Stage& stage, int k_stop, AwaitFull const& await_full) {
    if constexpr (kEnabled) {
      if (!stores_) return;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int k_tile = k_stop - kStages; k_tile < k_stop; ++k_tile, ++stage) {
        if (k_tile != next_) continue;
        next_ += tiles_.divisor;
        await_full(stage);
        store_(stage.index(), k_tile);
      }
      wait();  // the next tile's loads are not held against these stores
    }
  }

  CUTLASS_DEVICE bool stores() const { return stores_; }

 private:
  static constexpr int kNever = 1 << 30;  // more k tiles than there are

  bool const stores_;
  FastDiv const& tiles_;
  Store const& store_;
  int next_ = kNever;
};

}  // namespace agmm
