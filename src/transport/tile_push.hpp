// What those who send tiles to their owners, and add up what the others have sent, have to know.
// The op fills this in; the epilogue runs the functions of tile_push_device.hpp with it.
#pragma once

#include <cstdint>

#include "order/scatter_tiles.hpp"
#include "sync/wait_limit.hpp"
#include "transport/sm_push.hpp"

namespace agmm {

struct TilePushArgs {
  ScatterTiles tiles{};
  uint32_t tag = 0;    // what signals carry
  float scale = 1.0f;  // of the whole sum

  // This rank's memory. Stretches of `part_bytes` at the places, each [tiles of a chunk][bytes of a
  // tile]; signals [places][kMaxScatterTiles].
  char const* parts = nullptr;
  int64_t part_bytes = 0;
  uint32_t* signals = nullptr;
  uint32_t* credits = nullptr;  // [places]: awaited (1) before anything is sent, and taken (0)
  uint32_t* go = nullptr;       // 0 before the call
  uint32_t* done = nullptr;     // 0 before the call

  /// At each other rank, by its place here: where this rank's sums and signals lie there, and the
  /// credit that this rank gives.
  struct Peer {
    char* part;
    uint32_t* signals;
    uint32_t* credit;
  } peers[kMaxPushRanks - 1]{};

  WaitLimit limit{};

  /// Clock cycles that a CTA takes for each kSendBytes, 0: as fast as it can.
  int32_t pace_cycles = 0;
};

/// Bytes of one bulk copy to a peer.
constexpr int kSendBytes = 1024;
/// Bytes per ns that all CTAs together send. More than links take makes them wait in the crossbar,
/// and behind them the loads of the same multiprocessor. A copy engine pushes 381 between H200 (18
/// links); a little more keeps a link busy while some CTAs have nothing to send: of
/// the paces tried on 2 H100 (1980 MHz at most), the best at K = 2048 and at K = 7168.
constexpr int64_t kSendBytesPerNs = 430;

/// `senders`: CTAs that may send at a time. `clock_khz`: of the multiprocessors.
constexpr int32_t pace_of(int32_t senders, int32_t clock_khz) {
  return int32_t(int64_t(kSendBytes) * senders * clock_khz / (kSendBytesPerNs * 1000 * 1000));
}

}  // namespace agmm
