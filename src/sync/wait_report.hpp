#pragma once

#include <cstdint>

namespace agmm {

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
};

}  // namespace agmm
