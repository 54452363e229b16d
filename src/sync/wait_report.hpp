#pragma once

#include <cstdint>

#include "order/host_device.hpp"

namespace agmm {

/// Word of a wait that takes long and goes on. In 64 bits, which one store writes: waits of many
/// threads, that write to one place, do not mix. 0: none.
struct LateWait {
  /// A wait says that it takes long each time that so many of its units (2^20 ns) have passed,
  /// during one unit.
  static constexpr uint32_t kUnits = 1024;

  bool is_credit = false;
  int32_t rank = 0;
  int32_t source = -1;  // -1: unknown
  int32_t chunk = 0;
  uint32_t turns = 0;  // of kUnits each

  AGMM_HOST_DEVICE uint64_t packed() const {
    return uint64_t(1) << 63 | uint64_t(is_credit) << 62 | field(uint32_t(rank), 12) << 50 |
           field(uint32_t(source + 1), 12) << 38 | field(uint32_t(chunk), 22) << 16 |
           field(turns, 16);
  }
  static LateWait of(uint64_t word) {
    return {(word >> 62 & 1) != 0, int32_t(word >> 50 & 0xfff), int32_t(word >> 38 & 0xfff) - 1,
            int32_t(word >> 16 & 0x3fffff), uint32_t(word & 0xffff)};
  }
  double seconds() const { return double(turns) * kUnits * double(1 << 20) * 1e-9; }

 private:
  /// What does not fit into a field is cut: it is read by people.
  AGMM_HOST_DEVICE static uint64_t field(uint32_t value, int bits) {
    return value & ((uint32_t(1) << bits) - 1);
  }
};

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
  uint64_t late;  // a LateWait, packed
};

}  // namespace agmm
