#pragma once

#include <cstdint>

#include "order/host_device.hpp"

namespace agmm {

/// A wait that takes long and goes on, as it leaves word of itself. Who waits stands in a key that
/// the host knows (report_place), since the warp that waits has no register left for more.
struct LateWait {
  /// A wait says that it takes long each time that so many of its units (2^20 ns) are over.
  static constexpr uint32_t kUnits = 1024;
  // Both and the bit of a credit are 32 bits: a key for each rank of each group of the process, 511
  // at most, and four million chunks.
  static constexpr int kKeyBits = 9;
  static constexpr int kChunkBits = 22;

  /// The word for a chunk or, where a credit is awaited, for the peer that is to give it. `key`:
  /// not 0.
  AGMM_HOST_DEVICE static constexpr uint32_t what(uint32_t key, bool is_credit, int32_t chunk) {
    return key << (kChunkBits + 1) | uint32_t(is_credit) << kChunkBits | uint32_t(chunk);
  }
  static uint32_t key(uint32_t what) { return what >> (kChunkBits + 1); }
  static bool is_credit(uint32_t what) { return (what >> kChunkBits & 1) != 0; }
  static int32_t chunk(uint32_t what) { return int32_t(what & ((1u << kChunkBits) - 1)); }
};

/// Ranks that one wait can be for.
constexpr int kMaxLateSources = 8;

/// What a kernel says of a wait that passed its limit. In pinned host memory; a host thread reads
/// it and ends the process with a message.
struct WaitReport {
  // Credit: `source` is the peer whose buffer `chunk` did not become free.
  enum Kind : uint32_t { None = 0, Timeout = 1, Mismatch = 2, Credit = 3 };
  uint32_t kind;
  int32_t rank;
  int32_t source;  // -1: unknown
  int32_t chunk;
  uint32_t seen;
  uint32_t wanted;
  uint64_t waited_ns;
  uint64_t limit_ns;
  uint32_t late_what;   // LateWait::what; 0: none. Several may write; what they say mixes, and
  uint32_t late_units;  // all of it is late
  // The late_units of each rank, where a wait is for several at once; 0: not late.
  uint32_t late_of[kMaxLateSources];
};

}  // namespace agmm
