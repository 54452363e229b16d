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
};

}  // namespace agmm
