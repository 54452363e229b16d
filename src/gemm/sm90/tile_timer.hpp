// Records TileTimes and ScatterTimes, in the kernels that are built to.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "gemm/tile_times.hpp"
#include "order/scatter_tiles.hpp"
#include "sync/device_wait.hpp"

namespace agmm {

/// Times one tile; the lane that issues its loads calls it. Without kTimed nothing is left of it.
template <bool kTimed>
class TileTimer {
 public:
  /// `times`: of all tiles; null: nothing is recorded. `tile`: -1 for one that is not recorded.
  CUTLASS_DEVICE TileTimer(TileTimes* times, int tile) : times_(times), tile_(tile) {}

  CUTLASS_DEVICE void begins() const {
    if (!is_recorded()) return;
    TileTimes& times = times_[tile_];
    times.wait_begin_ns = times.wait_end_ns = times.found_ns = global_timer_ns();
  }

  /// More chunks have been found; `is_first`: no load of the tile was issued before.
  CUTLASS_DEVICE void found(bool is_first) const {
    if (!is_recorded()) return;
    TileTimes& times = times_[tile_];
    times.found_ns = global_timer_ns();
    if (is_first) times.wait_end_ns = times.found_ns;
  }

  CUTLASS_DEVICE void ends() const {
    if (!is_recorded()) return;
    TileTimes& times = times_[tile_];
    times.loads_end_ns = global_timer_ns();
    asm volatile("mov.u32 %0, %%smid;" : "=r"(times.sm));
  }

 private:
  CUTLASS_DEVICE bool is_recorded() const { return kTimed && tile_ >= 0; }

  TileTimes* times_;
  int tile_;
};

/// Times a tile of a matmul + reduce-scatter; one thread calls each function.
template <bool kTimed>
class ScatterTimer {
 public:
  /// `times`: [w][tiles of a chunk]; null: nothing is recorded. `tile`: -1 for one that only pads.
  CUTLASS_DEVICE ScatterTimer(ScatterTimes* times, ScatterTiles const& tiles, int32_t owner,
                              int32_t tile) {
    if constexpr (kTimed) {
      if (times != nullptr && tile >= 0) of_tile_ = times + owner * tiles.tiles() + tile;
    }
  }

  CUTLASS_DEVICE void loads_begin() const {
    if (is_recorded()) of_tile_->loads_begin_ns = global_timer_ns();
  }

  CUTLASS_DEVICE void loads_end() const {
    if (!is_recorded()) return;
    of_tile_->loads_end_ns = global_timer_ns();
    asm volatile("mov.u32 %0, %%smid;" : "=r"(of_tile_->sm));
  }

  CUTLASS_DEVICE void computed() const {
    if (is_recorded()) of_tile_->computed_ns = global_timer_ns();
  }

  CUTLASS_DEVICE void done() const {
    if (is_recorded()) of_tile_->done_ns = global_timer_ns();
  }

 private:
  CUTLASS_DEVICE bool is_recorded() const { return kTimed && of_tile_ != nullptr; }

  ScatterTimes* of_tile_ = nullptr;
};

}  // namespace agmm
