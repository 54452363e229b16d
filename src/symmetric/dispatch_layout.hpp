// The symmetric memory of a dispatch of rows: what lies where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "symmetric/collective_layout.hpp"

namespace agmm {

/// Offsets in bytes, a function of two numbers, so that every rank computes the same. First two
/// slots, in each of which a rank offers its tokens; then words, every group of them on a cache
/// line of its own.
class DispatchLayout {
 public:
  static constexpr int kSlots = 2;
  static constexpr std::size_t kAlignment = 128;  // a cache line

  DispatchLayout(std::size_t slot_bytes, int world_size) : slot_bytes_(slot_bytes) {
    if (world_size < 2 || world_size > kMaxExchangeRanks) {
      throw std::invalid_argument("world_size: found " + std::to_string(world_size) +
                                  ", wanted 2 to " + std::to_string(kMaxExchangeRanks));
    }
    if (slot_bytes % kAlignment != 0) {
      throw std::invalid_argument("slot_bytes: found " + std::to_string(slot_bytes) +
                                  ", wanted a multiple of " + std::to_string(kAlignment));
    }
  }

  std::size_t slot_bytes() const { return slot_bytes_; }
  std::size_t data(int slot) const { return static_cast<std::size_t>(slot) * slot_bytes_; }
  std::size_t words_offset() const { return kSlots * slot_bytes_; }
  /// [sources]: the tag of the call whose tokens a source has offered in its slot.
  std::size_t offers(int slot) const { return line(slot); }
  /// The slot of the next call.
  std::size_t turn() const { return line(kSlots); }
  /// How many CTAs of a launch have come to their end.
  std::size_t finished() const { return line(kSlots + 1); }
  std::size_t bytes() const { return line(kSlots + 2); }

  /// All words are 0 before the first call.
  std::vector<std::size_t> credit_words() const { return {}; }

 private:
  std::size_t line(int number) const {
    return words_offset() + static_cast<std::size_t>(number) * kAlignment;
  }

  std::size_t slot_bytes_;
};

}  // namespace agmm
