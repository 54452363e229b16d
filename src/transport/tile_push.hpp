// What those who send tiles to their owners, and add up what the others have sent, have to know.
// The op fills this in; the epilogue runs the functions of tile_push_device.hpp with it.
#pragma once

#include <cstdint>

#include "order/scatter_tiles.hpp"
#include "sync/wait_limit.hpp"
#include "transport/sm_push.hpp"

namespace agmm {

/// Bytes of one bulk copy to a peer.
constexpr int kSendBytes = 1024;
/// Bytes per ns that all CTAs together send. More than links take makes them wait in the crossbar,
/// and behind them the loads of the same multiprocessor. A copy engine pushes 381 between H200 (18
/// links): where tiles are computed more slowly than that, less leaves the links some room; where
/// they keep them busy, a little more makes up for CTAs that have nothing to send. Of 340, 370, 400
/// and 430 the best on 2 H100 at K = 7168 and at K = 2048.
constexpr int32_t kLeastSendBytesPerNs = 370;
constexpr int32_t kMostSendBytesPerNs = 400;
/// What the MMAs of a multiprocessor take in a cycle: bytes of a row of A times elements of a tile.
constexpr int64_t kMmaBytesPerCycle = 4096;

/// The rate at which tiles are computed at most, within these bounds. `k_bytes`: of a row of A.
AGMM_HOST_DEVICE constexpr int32_t send_bytes_per_ns(int64_t k_bytes, int32_t ctas,
                                                     int32_t clock_khz) {
  int64_t const bytes = 2 * kMmaBytesPerCycle * ctas * clock_khz / (1000 * 1000);
  return max_of(kLeastSendBytesPerNs, min_of(kMostSendBytesPerNs, int32_t(bytes / k_bytes)));
}

/// Copies of all CTAs that are not complete at a time, at most where more CTAs send than have
/// kLogFewestUnderWay each of them: 4 of each of the 132 of an H100, with which the rate was tried.
constexpr int32_t kMostUnderWay = 528;
/// Copies of one CTA under way, as powers of 2. With 4 of them it sends 3 to 4 bytes per ns; where
/// few CTAs send, each needs more of them to fill the links, up to a tile of 128 x 128.
constexpr int32_t kLogFewestUnderWay = 2;
constexpr int32_t kLogMostUnderWay = 5;

/// How a CTA sends where so many do at a time.
struct SendPace {
  int32_t cycles = 0;  // for each kSendBytes, at the highest clock; 0: as fast as it can
  int32_t log_under_way = kLogFewestUnderWay;  // of copies, a power of 2

  SendPace() = default;

  /// `clock_khz`: the highest of the multiprocessors. `bytes_per_ns`: of all senders.
  AGMM_HOST_DEVICE constexpr SendPace(int32_t senders, int32_t clock_khz,
                                      int32_t bytes_per_ns = kMostSendBytesPerNs)
      : cycles(int32_t(int64_t(kSendBytes) * senders * clock_khz /
                       (int64_t(bytes_per_ns) * 1000 * 1000))) {
    while (log_under_way < kLogMostUnderWay && (senders << (log_under_way + 1)) <= kMostUnderWay) {
      ++log_under_way;
    }
  }
};

/// The paces of a launch. A CTA's n-th tile is one of the n-th wave; tiles that are sent come
/// before those that stay, so all CTAs send in all waves but the last that sends.
struct SendPaces {
  SendPace usual{};
  SendPace last{};
  int32_t last_wave = 0;
  float highest_clock = 0;  // cycles per ns

  SendPaces() = default;

  /// `sent`: tiles of all others' chunks; `ctas`: tiles of a wave; `k_bytes`: of a row of A.
  SendPaces(int32_t sent, int32_t ctas, int32_t clock_khz, int64_t k_bytes)
      : usual(ctas, clock_khz, send_bytes_per_ns(k_bytes, ctas, clock_khz)),
        last_wave(max_of(0, sent - 1) / ctas),
        highest_clock(float(clock_khz) * 1e-6f) {
    last =
        SendPace(sent - last_wave * ctas, clock_khz, send_bytes_per_ns(k_bytes, ctas, clock_khz));
  }

  /// The paces of an all-reduce. Of w tiles w - 1 go to one rank and one goes to w - 1 of them, so
  /// a wave of tiles sends 2 * (w - 1) / w times what one of a scatter sends. The pace is that of
  /// the kilobytes of a tile, each of which goes to all its ranks; those of the last wave are own
  /// ones.
  static SendPaces of_all_reduce(int32_t tiles, int32_t ctas, int32_t world_size,
                                 int32_t clock_khz) {
    SendPaces paces;
    int32_t const others = world_size - 1;
    paces.usual = SendPace(ceil_div(2 * others * ctas, world_size), clock_khz);
    paces.last_wave = max_of(0, tiles - 1) / ctas;
    paces.highest_clock = float(clock_khz) * 1e-6f;
    paces.last = SendPace(others * (tiles - paces.last_wave * ctas), clock_khz);
    return paces;
  }

  AGMM_HOST_DEVICE SendPace const& of_wave(int32_t wave) const {
    return wave == last_wave ? last : usual;
  }
};

struct TilePushArgs {
  ScatterTiles tiles{};
  uint32_t tag = 0;    // what signals carry
  float scale = 1.0f;  // of the whole sum

  // This rank's memory: stretches of `part_bytes` at the places, each [tiles of a chunk][bytes of a
  // tile], which an all-reduce has twice, for finished tiles behind the sums; signals
  // [places][kMaxScatterTiles].
  char const* parts = nullptr;
  int64_t part_bytes = 0;
  uint32_t* signals = nullptr;
  uint32_t* credits = nullptr;  // [places]: awaited (1) before anything is sent, and taken (0)
  uint32_t* go = nullptr;       // 0 before the call
  uint32_t* done = nullptr;     // 0 before the call
  uint32_t* claims = nullptr;   // [kClaimWords], 0 before the call

  /// What this rank writes at another rank, listed by that rank's place here: its sums, its signals
  /// and the credit that it gives.
  struct Peer {
    char* part;
    uint32_t* signals;
    uint32_t* credit;
  } peers[kMaxPushRanks - 1]{};

  WaitLimit limit{};

  SendPaces paces{};
};
}  // namespace agmm
