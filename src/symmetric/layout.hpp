// The symmetric memory of a workspace: what lies where, and the same memory of all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "order/chunking.hpp"
#include "symmetric/slot_ring.hpp"

namespace agmm {

/// Offsets in bytes, a function of two numbers, so that every rank computes the same. First the
/// gather buffers of all slots, then the places for staged shards, then the words of all slots.
///
/// The words of a slot: per rank a tag, `kMaxColumnChunks` signals and a credit, the tags and the
/// signals in one stretch, since they are reset together; then single words.
class WorkspaceLayout {
 public:
  static constexpr int kSlots = SlotRing::kSlots;
  static constexpr std::size_t kBufferAlignment = 128;  // a cache line; TMA wants 16

  enum class Single {
    FinishedWarps,  // of the consumer
    HeadClaims,     // SM push: the next items of head and tail that nobody has taken,
    TailClaims,
    Go,         // and that all credits have been seen
    StageCtas,  // of the stage kernel that are done
    Sent,       // copies beside the consumer have sent the shard
    Count,
  };
  /// These are the consumer's to reset.
  static constexpr int kConsumerSingles = static_cast<int>(Single::StageCtas);

  WorkspaceLayout(std::size_t slot_bytes, int world_size)
      : slot_bytes_(slot_bytes), world_size_(static_cast<std::size_t>(world_size)) {
    if (world_size < 1) {
      throw std::invalid_argument("world_size: found " + std::to_string(world_size) +
                                  ", wanted at least 1");
    }
    if (slot_bytes % kBufferAlignment != 0) {
      throw std::invalid_argument("slot_bytes: found " + std::to_string(slot_bytes) +
                                  ", wanted a multiple of " + std::to_string(kBufferAlignment));
    }
  }

  std::size_t slot_bytes() const { return slot_bytes_; }
  int world_size() const { return static_cast<int>(world_size_); }
  std::size_t bytes() const { return words_offset() + kSlots * words_per_slot() * kWordBytes; }

  /// [world_size shards] of a call.
  std::size_t gather_buffer(int slot) const { return index(slot) * slot_bytes_; }
  /// The own shard, where the peers read it.
  std::size_t staged_shard(int slot) const {
    return kSlots * slot_bytes_ + index(slot) * stage_bytes();
  }
  std::size_t words_offset() const { return kSlots * (slot_bytes_ + stage_bytes()); }
  std::size_t tags(int slot) const { return word(slot, 0); }
  std::size_t signals(int slot) const { return word(slot, world_size_); }
  std::size_t credits(int slot) const { return word(slot, world_size_ * (1 + kMaxColumnChunks)); }
  std::size_t single(int slot, Single which) const {
    return word(slot, world_size_ * kWordsPerRank + static_cast<std::size_t>(which));
  }

  /// Indices, counted from words_offset(), of the words that are 1 before the first call: every
  /// credit. The others are 0.
  std::vector<std::size_t> credit_words() const {
    std::vector<std::size_t> found;
    for (int slot = 0; slot < kSlots; ++slot) {
      for (std::size_t rank = 0; rank < world_size_; ++rank) {
        found.push_back((credits(slot) - words_offset()) / kWordBytes + rank);
      }
    }
    return found;
  }

 private:
  static constexpr std::size_t kWordBytes = sizeof(uint32_t);
  static constexpr std::size_t kWordsPerRank = 1 + kMaxColumnChunks + 1;
  static constexpr std::size_t kLineWords = 32;  // of 128 bytes, which the slots do not share

  static std::size_t index(int slot) { return static_cast<std::size_t>(slot); }
  static std::size_t round_up(std::size_t value, std::size_t to) {
    return (value + to - 1) / to * to;
  }
  // All shards of a slot are equally long.
  std::size_t stage_bytes() const { return round_up(slot_bytes_ / world_size_, kBufferAlignment); }
  std::size_t words_per_slot() const {
    return round_up(world_size_ * kWordsPerRank + static_cast<std::size_t>(Single::Count),
                    kLineWords);
  }
  std::size_t word(int slot, std::size_t i) const {
    return words_offset() + (index(slot) * words_per_slot() + i) * kWordBytes;
  }

  std::size_t slot_bytes_;
  std::size_t world_size_;
};

/// The memory of all ranks, as one of them addresses it.
class SymmetricMemory {
 public:
  using Single = WorkspaceLayout::Single;

  SymmetricMemory(int rank, std::vector<uintptr_t> bases, std::size_t slot_bytes)
      : rank_(rank),
        bases_(std::move(bases)),
        layout_(slot_bytes, static_cast<int>(bases_.size())) {
    if (rank < 0 || rank >= world_size()) {
      throw std::invalid_argument("rank: found " + std::to_string(rank) + ", wanted 0 to " +
                                  std::to_string(world_size() - 1));
    }
  }

  int rank() const { return rank_; }
  int world_size() const { return layout_.world_size(); }
  std::size_t slot_bytes() const { return layout_.slot_bytes(); }
  /// The rank `distance` before this one in the ring, which computes this one's shard so many
  /// chunks after its own.
  int rank_before(int distance) const { return (rank_ + world_size() - distance) % world_size(); }
  int rank_after(int distance) const { return (rank_ + distance) % world_size(); }

  char* gather_buffer(int rank, int slot) const {
    return at<char>(rank, layout_.gather_buffer(slot));
  }
  char* staged_shard(int rank, int slot) const {
    return at<char>(rank, layout_.staged_shard(slot));
  }
  uint32_t* tags(int rank, int slot) const { return at<uint32_t>(rank, layout_.tags(slot)); }
  uint32_t* signals(int rank, int slot) const { return at<uint32_t>(rank, layout_.signals(slot)); }
  uint32_t* credits(int rank, int slot) const { return at<uint32_t>(rank, layout_.credits(slot)); }
  /// A word of this rank alone: no other rank reads or writes it.
  uint32_t* single(int slot, Single which) const {
    return at<uint32_t>(rank_, layout_.single(slot, which));
  }

 private:
  template <class T>
  T* at(int rank, std::size_t offset) const {
    return reinterpret_cast<T*>(bases_[static_cast<std::size_t>(rank)] + offset);
  }

  int rank_;
  std::vector<uintptr_t> bases_;
  WorkspaceLayout layout_;
};

}  // namespace agmm
