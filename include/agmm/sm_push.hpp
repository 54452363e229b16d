// What the warps that carry out the SM push transport have to know. The transport fills this in;
// src/cuda's kernels run agmm::push_shard (push_warp.hpp) with it.
#pragma once

#include <cstdint>

#include "agmm/chunking.hpp"
#include "agmm/host_device.hpp"

namespace agmm {

constexpr int kMaxPushRanks = 16;
constexpr int kMaxPushParts = 64;  // a power of 2, at most PushOrder::kItemsPerLevel

/// The order in which the shard is pushed. It is cut into chunks of columns, and a chunk into parts
/// of rows; an item is 2^level neighbouring parts of a chunk. The first chunks go in small items,
/// so that they arrive early although all warps send at once; the later ones in large items, since
/// a warp pays for a system fence per item.
///
/// With two rounds the nearest consumers get all chunks in the first, the others in the second.
/// Invariant (tested on the CPU): the items [0, count()) are every part of every chunk once per
/// round, chunk by chunk.
struct PushOrder {
  static constexpr int kItemsPerLevel = 128;  // about one per multiprocessor

  struct Item {
    int32_t round;
    int32_t chunk;
    int32_t part;   // the first one
    int32_t parts;  // how many
  };

  int32_t chunks = 1;
  int32_t log_parts = 0;  // of a chunk
  int32_t max_level = 0;  // at most log_parts
  int32_t rounds = 1;
  int32_t first_round = 0;  // items

  PushOrder() = default;

  PushOrder(int32_t chunks_, int32_t log_parts_, int32_t max_level_, int32_t rounds_)
      : chunks(chunks_), log_parts(log_parts_), max_level(max_level_), rounds(rounds_) {
    int32_t level = 0;
    while (level < max_level && chunks_before(level + 1) < chunks) ++level;
    first_round = level * kItemsPerLevel + ((chunks - chunks_before(level)) << (log_parts - level));
  }

  AGMM_HOST_DEVICE int32_t count() const {
    return first_round + (rounds == 1 ? 0 : chunks << (log_parts - max_level));
  }

  AGMM_HOST_DEVICE Item item(int32_t i) const {
    Item item{};
    int32_t level = max_level;
    if (i < first_round) {
      level = min_of(i / kItemsPerLevel, max_level);
      i -= level * kItemsPerLevel;
      item.chunk = chunks_before(level);
    } else {
      i -= first_round;
      item.round = 1;
    }
    item.chunk += i >> (log_parts - level);
    item.part = (i & ((1 << (log_parts - level)) - 1)) << level;
    item.parts = 1 << level;
    return item;
  }

 private:
  AGMM_HOST_DEVICE int32_t chunks_before(int32_t level) const {
    return (((1 << level) - 1) * kItemsPerLevel) >> log_parts;
  }
};

struct SmPushArgs {
  int32_t rank = 0;
  int32_t world_size = 1;
  int32_t slot = 0;  // for the message

  void const* shard = nullptr;  // [rows, row_vectors * 16 bytes], aligned to 16; null: no push
  int32_t rows = 0;
  int32_t row_vectors = 0;
  int32_t chunk_vectors = 0;  // of a row; the last chunk may have fewer
  PushOrder order{};
  int32_t first_peers = 0;  // ranks served in the first of two rounds
  /// Where this rank's rows and signals lie at each rank. At its own place it writes only the rows
  /// [0, head) and [rows - tail, rows); none and no signals where both are 0.
  struct Place {
    void* rows;
    uint32_t* signals;  // one per chunk
  } places[kMaxPushRanks]{};
  int32_t head = 0;
  int32_t tail = 0;

  // Each part of a chunk adds 1 to its signal, part 0 the tag too.
  uint32_t tag = 0;
  uint32_t* credits = nullptr;  // one per rank: awaited (1) before a write, and taken (0)
  uint32_t* claims = nullptr;   // 0 before the call: the next item that nobody has taken
  uint32_t* go = nullptr;       // 0 before the call: 1 once somebody has seen all credits
};

}  // namespace agmm
