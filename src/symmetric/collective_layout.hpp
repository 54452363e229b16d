// The symmetric memory of the collectives: what lies where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "order/host_device.hpp"

namespace agmm {

/// How a collective's data travels.
///
/// Packets carry 12 bytes of data and their signal, so nothing has to be awaited between the two.
/// Blocks carry data alone, and have a signal each: a third less to send, one more trip.
enum class Carrier : int32_t { Packets = 0, Blocks = 1 };

/// What one thread moves at a time is a group of elements, 16 bytes of memory in either carrier.
constexpr int kGroupBytes = 16;
constexpr int kPacketDataBytes = 12;

constexpr int kExchangeThreads = 512;  // of a CTA, at most
/// A block is what one CTA sends and signals at once: 1 to 4 groups of each thread.
constexpr int kMaxThreadGroups = 4;
constexpr int kLeastBlockGroups = kExchangeThreads;
/// CTAs of a launch, at most.
constexpr int kMaxExchangeCtas = 256;
constexpr int kMaxExchangeRanks = 8;
/// What a kernel that norms rows counts its CTAs and claims by (gemm/sm90/streamed_norm.hpp).
constexpr int kNormCounters = 3;

/// Offsets in bytes, a function of two numbers, so that every rank computes the same. First the
/// blocks of both slots, then their packets, then words.
///
/// Each rank has a stretch for every step and source: in the first step of a call the ranks send
/// what they have, in the second the sums that they have made.
class CollectiveLayout {
 public:
  static constexpr int kSlots = 2;
  static constexpr int kSteps = 2;
  static constexpr std::size_t kAlignment = 128;  // a cache line
  /// Bytes of a slot's packets. What takes more goes faster in blocks.
  static constexpr std::size_t kPacketBytes = std::size_t(4) << 20;

  static constexpr std::size_t kMaxSlotBytes = std::size_t(1) << 30;  // kernels count in 32 bits

  /// `slot_bytes`: of a slot's blocks.
  CollectiveLayout(std::size_t slot_bytes, int world_size)
      : slot_bytes_(slot_bytes), stretches_(std::size_t(kSteps) * std::size_t(world_size)) {
    if (world_size < 2 || world_size > kMaxExchangeRanks) {
      throw std::invalid_argument("world_size: found " + std::to_string(world_size) +
                                  ", wanted 2 to " + std::to_string(kMaxExchangeRanks));
    }
    if (slot_bytes % kAlignment != 0 || slot_bytes > kMaxSlotBytes) {
      throw std::invalid_argument("slot_bytes: found " + std::to_string(slot_bytes) +
                                  ", wanted a multiple of " + std::to_string(kAlignment) +
                                  " up to " + std::to_string(kMaxSlotBytes));
    }
  }

  std::size_t slot_bytes() const { return slot_bytes_; }

  /// Groups that one rank can send to another in a step.
  std::size_t groups(Carrier carrier) const {
    return carrier == Carrier::Packets ? packet_stretch() / kGroupBytes
                                       : blocks() * kLeastBlockGroups;
  }
  /// Bytes from one source's stretch to the next.
  std::size_t stretch_bytes(Carrier carrier) const {
    return carrier == Carrier::Packets ? packet_stretch() : block_stretch();
  }
  /// Blocks, and so signals, of a stretch.
  std::size_t blocks() const { return block_stretch() / kGroupBytes / kLeastBlockGroups; }

  std::size_t data(Carrier carrier, int slot) const {
    std::size_t const i = static_cast<std::size_t>(slot);
    return carrier == Carrier::Blocks ? i * slot_bytes_ : words_offset() + i * kPacketBytes;
  }
  /// Packets hold signals, so they are words too.
  std::size_t words_offset() const { return kSlots * slot_bytes_; }
  /// [steps][sources][blocks]
  std::size_t signals(int slot) const {
    return words_offset() + kSlots * kPacketBytes +
           static_cast<std::size_t>(slot) * stretches_ * blocks() * sizeof(uint32_t);
  }
  /// The slot of the next call, for each CTA.
  std::size_t turns() const { return round_down(signals(kSlots) + kAlignment - 1); }
  /// They are this rank's, as the turns are, and are kept between calls.
  std::size_t counters() const { return turns() + kMaxExchangeCtas * sizeof(uint32_t); }
  std::size_t bytes() const { return counters() + kNormCounters * sizeof(uint32_t); }

  /// All words are 0 before the first call.
  std::vector<std::size_t> credit_words() const { return {}; }

 private:
  static std::size_t round_down(std::size_t value) { return value / kAlignment * kAlignment; }
  std::size_t packet_stretch() const { return round_down(kPacketBytes / stretches_); }
  std::size_t block_stretch() const { return round_down(slot_bytes_ / stretches_); }

  std::size_t slot_bytes_;
  std::size_t stretches_;  // of a slot
};

}  // namespace agmm
