// The gate between a transport and a producer warp: up to which k tile may a tile load? It knows
// chunks and signals, and nothing of the operands.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "order/chunking.hpp"
#include "sync/device_wait.hpp"
#include "testing/fault.hpp"
#include "testing/stress_delay.hpp"

namespace agmm {

/// The chunks of the gathered operand, and how their arrival is seen.
struct ChunkArrival {
  ChunkGrid chunks{};
  uint32_t const* signals = nullptr;  // null: everything is there
  uint32_t ready_value = 1;
  WaitLimit wait_limit{};
};

/// Of one tile, `kTileRows` rows of the gathered operand by k tiles of `kTileK` columns. For all 32
/// lanes of a producer warp together, which look at 32 columns of chunks at once. `kManyRows`: or
/// at 32 rows of chunks, where A has one column of them: a tile of a call with few rows needs
/// several.
template <int kTileRows, int kTileK, bool kManyRows = false>
class ChunkGate {
 public:
  /// `is_open`: the tile's rows need no signal.
  CUTLASS_DEVICE ChunkGate(ChunkArrival const& arrival, int32_t first_row, Range k_tiles,
                           bool is_open)
      : arrival_(arrival),
        first_row_(first_row),
        k_stop_(k_tiles.end),
        awaits_(arrival.signals != nullptr && !is_open),
        ready_(awaits_ && !kNoWait ? k_tiles.begin * kTileK / arrival.chunks.columns_per_chunk
                                   : arrival.chunks.chunks_k) {}

  /// k tiles before this one may be loaded.
  CUTLASS_DEVICE int k_end() const {
    return ready_ == arrival_.chunks.chunks_k
               ? k_stop_
               : min_of(k_stop_, ready_ * arrival_.chunks.columns_per_chunk / kTileK);
  }
  CUTLASS_DEVICE int k_stop() const { return k_stop_; }

  /// Looks whether more is there; true: it may be loaded by TMA by any lane, after a __syncwarp()
  /// of the caller's where this is not the lane that looked. `waits`: until there is more.
  CUTLASS_DEVICE bool look(bool waits) {
    int const arrived = arrived_columns(waits);
    if (arrived == 0) return false;
    fence_proxy_async_global();
    ready_ += arrived;
    return true;
  }

  /// The fault no_wait: the signals are awaited after the loads, so that they and the credits stay
  /// in step, and wrong elements are all that comes of it.
  CUTLASS_DEVICE void look_too_late() {
    for (ready_ = 0; awaits_ && ready_ < arrival_.chunks.chunks_k;) {
      ready_ += arrived_columns(true);
    }
  }

 private:
  /// How many columns of chunks from `ready_` on are there for the tile's rows, acquired; at most
  /// one per lane.
  CUTLASS_DEVICE int arrived_columns(bool waits) const {
    stress_delay_warp(arrival_.wait_limit.rank);
    if constexpr (kManyRows) {
      if (arrival_.chunks.chunks_k == 1) return arrived_rows(waits) ? 1 : 0;
    }
    uint32_t since = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (;;) {
      Range const chunks = arrival_.chunks.row_chunks({first_row_, first_row_ + kTileRows});
      int32_t const chunk_k = ready_ + lane_id();
      bool is_ready = chunk_k < arrival_.chunks.chunks_k;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t chunk_m = chunks.begin; is_ready && chunk_m < chunks.end; ++chunk_m) {
        int32_t const i = arrival_.chunks.signal_index(chunk_m, chunk_k);
        uint32_t const seen =
            look_at_signal(arrival_.signals + i, arrival_.ready_value, i, arrival_.wait_limit);
        is_ready = seen == arrival_.ready_value;
        if (!is_ready && lane_id() == 0) {
          check_wait(seen, arrival_.ready_value, i, arrival_.wait_limit, since);
        }
      }
      __syncwarp();
      // The lanes below the first one whose chunks are not there; all where there is none.
      uint32_t const missing = ~__ballot_sync(0xffffffffu, is_ready);
      int const arrived = missing == 0 ? 32 : __ffs(int(missing)) - 1;
      if (arrived != 0 || !waits) return arrived;
    }
  }

  /// Whether all chunks of the only column are there.
  CUTLASS_DEVICE bool arrived_rows(bool waits) const {
    uint32_t since = 0;
    Range const chunks = arrival_.chunks.row_chunks({first_row_, first_row_ + kTileRows});
    CUTLASS_PRAGMA_NO_UNROLL
    for (;;) {
      bool is_ready = true;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t i = chunks.begin + lane_id(); is_ready && i < chunks.end; i += 32) {
        uint32_t const seen =
            look_at_signal(arrival_.signals + i, arrival_.ready_value, i, arrival_.wait_limit);
        is_ready = seen == arrival_.ready_value;
        if (!is_ready) check_wait(seen, arrival_.ready_value, i, arrival_.wait_limit, since);
      }
      bool const are_all = __all_sync(0xffffffffu, is_ready);
      __syncwarp();  // the vote carries no memory order
      if (are_all || !waits) return are_all;
    }
  }

  ChunkArrival const& arrival_;
  int32_t const first_row_;
  int const k_stop_;
  bool const awaits_;
  int ready_;  // columns of chunks known to have arrived
};

}  // namespace agmm
