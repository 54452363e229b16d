// The symmetric memory of a combine of rows: what lies where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "symmetric/collective_layout.hpp"

namespace agmm {

/// Offsets in bytes, a function of two numbers, so that every rank computes the same. First the
/// slot, which holds where a token's rows are and then the rows; then words, every group of them on
/// a cache line of its own.
///
/// One slot: it has room for all rows of a rank, and the calls of the next layer come between two
/// calls, so that nobody waits for its credits.
class CombineLayout {
 public:
  static constexpr std::size_t kAlignment = 128;  // a cache line

  CombineLayout(std::size_t slot_bytes, int world_size)
      : slot_bytes_(slot_bytes), world_size_(static_cast<std::size_t>(world_size)) {
    if (world_size < 2 || world_size > kMaxExchangeRanks) {
      throw std::invalid_argument("world_size: found " + std::to_string(world_size) +
                                  ", wanted 2 to " + std::to_string(kMaxExchangeRanks));
    }
    if (slot_bytes % kAlignment != 0) {
      throw std::invalid_argument("slot_bytes: found " + std::to_string(slot_bytes) +
                                  ", wanted a multiple of " + std::to_string(kAlignment));
    }
  }

  /// Where the rows lie behind the places of so many choices.
  static std::size_t rows(int64_t choices) {
    std::size_t const bytes = static_cast<std::size_t>(choices) * sizeof(int32_t);
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  /// The slot that a call takes: of so many choices of all ranks' tokens, and rows of a rank.
  static std::size_t slot_bytes_of(int64_t choices, int64_t rows, int64_t row_bytes) {
    return CombineLayout::rows(choices) + static_cast<std::size_t>(rows * row_bytes);
  }

  std::size_t slot_bytes() const { return slot_bytes_; }
  std::size_t words_offset() const { return slot_bytes_; }
  /// [sources]: the tag of the call whose rows a source has in its slot.
  std::size_t tags() const { return line(0); }
  /// [owners]: whether an owner has done with this rank's slot.
  std::size_t credits() const { return line(1); }
  /// How many CTAs of a launch have come to their end.
  std::size_t finished() const { return line(2); }
  std::size_t bytes() const { return line(3); }

  /// Indices, counted from words_offset(), of the words that are 1 before the first call: every
  /// credit. The others are 0.
  std::vector<std::size_t> credit_words() const {
    std::vector<std::size_t> found;
    for (std::size_t owner = 0; owner < world_size_; ++owner) {
      found.push_back((credits() - words_offset()) / sizeof(uint32_t) + owner);
    }
    return found;
  }

 private:
  std::size_t line(std::size_t number) const { return words_offset() + number * kAlignment; }

  std::size_t slot_bytes_;
  std::size_t world_size_;
};

}  // namespace agmm
