// The symmetric memory of matmul + reduce-scatter: what lies where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "order/scatter_tiles.hpp"

namespace agmm {

/// Offsets in bytes, a function of two numbers, so that every rank computes the same. First the
/// others' sums, a stretch for each place (ScatterTiles::place), then words: per place a signal for
/// each tile and a credit, then single ones.
///
/// One slot: a call's own tiles come last and need all the others', so a rank that has begun the
/// next call would wait for the same peers in another slot too.
class ScatterLayout {
 public:
  static constexpr std::size_t kAlignment = 128;  // a cache line; bulk copies want 16

  enum class Single {
    Go,      // all credits have been seen
    Done,    // tiles that have been sent, or whose sums have been read
    Claims,  // the first of kClaimWords
    Count = Claims + kClaimWords,
  };

  /// `part_bytes`: of the sums that one rank sends to one other.
  ScatterLayout(std::size_t part_bytes, int world_size)
      : part_bytes_(part_bytes), places_(static_cast<std::size_t>(world_size) - 1) {
    if (world_size < 2) {
      throw std::invalid_argument("world_size: found " + std::to_string(world_size) +
                                  ", wanted at least 2");
    }
    if (part_bytes % kAlignment != 0) {
      throw std::invalid_argument("part_bytes: found " + std::to_string(part_bytes) +
                                  ", wanted a multiple of " + std::to_string(kAlignment));
    }
  }

  std::size_t part_bytes() const { return part_bytes_; }
  std::size_t part(int place) const { return index(place) * part_bytes_; }
  std::size_t words_offset() const { return places_ * part_bytes_; }
  std::size_t signals(int place) const { return word(index(place) * kMaxScatterTiles); }
  std::size_t credit(int place) const { return word(places_ * kMaxScatterTiles + index(place)); }
  std::size_t single(Single which) const {
    return word(places_ * (kMaxScatterTiles + 1) + static_cast<std::size_t>(which));
  }
  std::size_t bytes() const {
    return (single(Single::Count) + kAlignment - 1) / kAlignment * kAlignment;
  }

  /// Indices, counted from words_offset(), of the words that are 1 before the first call: every
  /// credit. The others are 0.
  std::vector<std::size_t> credit_words() const {
    std::vector<std::size_t> found;
    for (std::size_t place = 0; place < places_; ++place) {
      found.push_back(places_ * kMaxScatterTiles + place);
    }
    return found;
  }

 private:
  static std::size_t index(int place) { return static_cast<std::size_t>(place); }
  std::size_t word(std::size_t i) const { return words_offset() + i * sizeof(uint32_t); }

  std::size_t part_bytes_;
  std::size_t places_;
};

}  // namespace agmm
