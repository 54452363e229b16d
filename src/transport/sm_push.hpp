// What those who carry out the SM push transport have to know. The transport fills this in;
// the kernels run the functions of push_warp.hpp with it.
#pragma once

#include <cstdint>

#include "order/chunking.hpp"
#include "order/host_device.hpp"

namespace agmm {

/// The largest host has this many GPUs; each rank's place takes 16 bytes of the kernel's
/// parameters, and a lane looks at its credit. Timed with up to 4.
constexpr int kMaxPushRanks = 16;
/// A power of 2. A choice: with more, an item of a chunk has a row or two.
constexpr int kMaxPushParts = 64;

/// Bytes of an item to all peers of a round. The head's is pushed by a warp beside the matmul:
/// larger items delay the first chunk and saturate the links, which delays the matmul's own loads.
/// The tail's is pushed by a CTA that only pushes: smaller items do not keep the links busy.
/// Measured on 4 H200, the second at 2048 x 2112 x 7168, where items of half the size cost 20 us of
/// 108 (docs/dev/tried.md).
constexpr int64_t kHeadItemBytes = 12288;
constexpr int64_t kTailItemBytes = 49152;

/// Consumers should copy the first items where a rank sends up to this much. With more the links
/// are busy for long, and what they copy at once holds up the rest. Measured on 2 H200: 2 us gained
/// at 512 x 3584 x 8192, which sends 4 MiB, and 0.6 us lost with more than 12 MiB.
constexpr int64_t kConsumersCopyBytes = 12 << 20;

/// The order in which the shard is pushed. It is cut into chunks of columns, and a chunk into parts
/// of rows; an item is 2^level neighbouring parts of a chunk. The items of the head, which are the
/// first chunks, and of the tail are claimed apart. Small items arrive early although all push at
/// once; large ones cost fewer system fences, of which there is at most one per item.
///
/// With two rounds the nearest consumers get all chunks in the first, the others in the second;
/// then all is head.
/// Where K is split, the CTAs of a tile begin at different columns: then as many stretches of
/// chunks take turns. Invariant (tested on the CPU): the items of the head, then of the tail, are
/// every part of every chunk once per round, chunk by chunk, chunk 0 first.
struct PushOrder {
  struct Item {
    int32_t round;
    int32_t chunk;
    int32_t part;   // the first one
    int32_t parts;  // how many
  };

  int32_t chunks = 1;
  int32_t log_parts = 0;    // of a chunk
  int32_t head_chunks = 1;  // at least 1
  int32_t head_level = 0;   // at most log_parts
  int32_t tail_level = 0;
  int32_t rounds = 1;
  // The chunk at each place in the order. A table, since the pushing warps have no register for
  // arithmetic.
  uint8_t chunk_at[kMaxColumnChunks]{};

  PushOrder() = default;

  /// The chunks in as many stretches, all but the last `stretch_chunks` long, and that at least.
  PushOrder(int32_t chunks_, int32_t stretches, int32_t stretch_chunks) : chunks(chunks_) {
    for (int32_t i = 0; i < chunks; ++i) {
      bool const takes_turns = i < stretches * stretch_chunks;
      chunk_at[i] = uint8_t(takes_turns ? i % stretches * stretch_chunks + i / stretches : i);
    }
  }

  AGMM_HOST_DEVICE int32_t head_count() const {
    return (rounds * head_chunks) << (log_parts - head_level);
  }
  AGMM_HOST_DEVICE int32_t tail_count() const {
    return (chunks - head_chunks) << (log_parts - tail_level);
  }

  AGMM_HOST_DEVICE int32_t count(bool is_tail) const {
    return is_tail ? tail_count() : head_count();
  }

  AGMM_HOST_DEVICE Item item(bool is_tail, int32_t i) const {
    int32_t const level = is_tail ? tail_level : head_level;
    int32_t const log_items = log_parts - level;  // of a chunk
    Item item{};
    item.chunk = i >> log_items;
    item.part = (i & ((1 << log_items) - 1)) << level;
    item.parts = 1 << level;
    if (is_tail) {
      item.chunk += head_chunks;
    } else if (item.chunk >= head_chunks) {
      item.round = 1;
      item.chunk -= head_chunks;
    }
    item.chunk = chunk_at[item.chunk];
    return item;
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
  int32_t first_peers = 0;      // ranks served in the first of two rounds
  bool consumers_copy = false;  // the first items, where the kernel's consumers can
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
  // 0 before the call: the next items of head and tail that nobody has taken.
  uint32_t* claims = nullptr;
  uint32_t* tail_claims = nullptr;
  uint32_t* go = nullptr;  // 0 before the call: 1 once somebody has seen all credits

  // The scales of an fp8 shard, [rows, row_scales]; they go with the first chunk. Behind the rows
  // of a place they lie by so many bytes.
  float const* scales = nullptr;
  int64_t scales_behind = 0;
  int32_t row_scales = 0;
};

}  // namespace agmm
