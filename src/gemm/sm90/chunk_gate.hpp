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
  /// A bit of each signal, or 0 where there are more than a warp has lanes. Else the warp looks at
  /// all of a call's signals at once and keeps a bit of each that it has seen, which it need not
  /// look at again: they are reset when the call has ended.
  uint32_t all_signals = 0;
  WaitLimit wait_limit{};

  static uint32_t bit_of_each(ChunkGrid const& chunks) {
    return chunks.count() > 32 ? 0 : ~0u >> (32 - chunks.count());
  }
};

/// The signals that are there, by a warp's first look; acquired by its lanes, and by whoever comes
/// behind a barrier of theirs.
CUTLASS_DEVICE uint32_t first_look(ChunkArrival const& arrival) {
  if (arrival.signals == nullptr) return 0;
  stress_delay_warp(arrival.wait_limit.rank);
  int const i = lane_id();
  bool const is_there = (arrival.all_signals >> i & 1) != 0 &&
                        look_at_signal(arrival.signals + i, arrival.ready_value, i,
                                       arrival.wait_limit) == arrival.ready_value;
  return __ballot_sync(0xffffffffu, is_there);
}

/// The gate of one tile: `kTileRows` rows of the gathered operand by k tiles of `kTileK` columns.
/// All 32 lanes of a producer warp call it together. `kManyRows`: where there are more signals than
/// lanes and A has one column of chunks, they look at 32 rows of chunks at once: a tile of a call
/// with few rows needs several.
template <int kTileRows, int kTileK, bool kManyRows = false>
class ChunkGate {
 public:
  /// `is_open`: the tile's rows need no signal. `seen`: the signals that have been seen, kept from
  /// tile to tile in shared memory; those of other threads in front of a barrier and a
  /// fence_proxy_async_global().
  CUTLASS_DEVICE ChunkGate(ChunkArrival const& arrival, uint32_t& seen, int32_t first_row,
                           Range k_tiles, bool is_open)
      : arrival_(arrival),
        seen_(seen),
        first_row_(first_row),
        k_stop_(k_tiles.end),
        awaits_(arrival.signals != nullptr && !is_open),
        ready_(arrival.chunks.chunks_k) {
    bool const all_seen = arrival.all_signals != 0 && seen == arrival.all_signals;
    if (!awaits_ || all_seen || kNoWait) return;
    ready_ = k_tiles.begin * kTileK / arrival.chunks.columns_per_chunk;
    if (arrival.all_signals != 0) ready_ = seen_columns(row_chunks());
  }

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
    int const ready =
        arrival_.all_signals != 0 ? look_at_unseen(waits) : ready_ + arrived_columns(waits);
    if (ready == ready_) return false;
    fence_proxy_async_global();
    ready_ = ready;
    return true;
  }

  /// The fault no_wait: the signals are awaited after the loads, so that they and the credits stay
  /// in step, and wrong elements are all that comes of it.
  CUTLASS_DEVICE void look_too_late() {
    for (ready_ = 0; awaits_ && ready_ < arrival_.chunks.chunks_k;) look(true);
  }

 private:
  CUTLASS_DEVICE Range row_chunks() const {
    return arrival_.chunks.row_chunks({first_row_, first_row_ + kTileRows});
  }

  /// What `ready_` would be by the signals that have been seen.
  CUTLASS_DEVICE int seen_columns(Range rows) const {
    int32_t const chunks_k = arrival_.chunks.chunks_k;
    uint32_t columns = ~0u;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t row = rows.begin; row < rows.end; ++row) columns &= seen_ >> row * chunks_k;
    uint32_t const missing = ~(columns >> ready_);
    int const more = missing == 0 ? 32 : __ffs(int(missing)) - 1;
    return min_of(ready_ + more, chunks_k);
  }

  /// ready_ after a look at all signals that have not been seen, or after as many as it takes to
  /// find more.
  CUTLASS_DEVICE int look_at_unseen(bool waits) const {
    uint32_t since = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (;;) {
      stress_delay_warp(arrival_.wait_limit.rank);
      int const i = lane_id();
      uint32_t found = arrival_.ready_value;
      bool const looks = ((arrival_.all_signals & ~seen_) >> i & 1) != 0;
      if (looks) {
        found = look_at_signal(arrival_.signals + i, arrival_.ready_value, i, arrival_.wait_limit);
      }
      bool const is_there = looks && found == arrival_.ready_value;
      __syncwarp();  // the vote carries no memory order
      see(__ballot_sync(0xffffffffu, is_there));
      Range const rows = row_chunks();
      int const ready = seen_columns(rows);
      if (ready != ready_ || !waits) return ready;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t row = rows.begin; row < rows.end; ++row) {
        bool const is_awaited = i == arrival_.chunks.signal_index(row, ready);
        if (is_awaited && looks && !is_there) {
          check_wait(found, arrival_.ready_value, i, arrival_.wait_limit, since);
        }
      }
      __syncwarp();
    }
  }

  /// All lanes call it with the same signals.
  CUTLASS_DEVICE void see(uint32_t signals) const {
    if (signals == 0) return;
    uint32_t const seen = seen_ | signals;
    __syncwarp();  // all have read it
    if (lane_id() == 0) seen_ = seen;
    __syncwarp();
  }

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
  uint32_t& seen_;
  int32_t const first_row_;
  int const k_stop_;
  bool const awaits_;
  int ready_;  // columns of chunks known to have arrived
};

}  // namespace agmm
