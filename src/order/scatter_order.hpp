// The order of a matmul + reduce-scatter, host and device: which rank's rows are computed when,
// where the parts of a sum lie, and in which bands a large call goes through the memory.
//
// Every rank computes A @ B for all rows and keeps the sum over the ranks of its own rows. The part
// that a rank (the source) adds to another's rows (the owner's) goes to a slot in the owner's
// memory, rounded once to the element type; the owner's own part stays in its accumulator and is
// not rounded. The owner adds the parts in an order that is always the same: on the CPU in that of
// the ranks, 0 to world_size - 1; on a GPU its own first, which its accumulator holds, then the
// others' as they come, so that only the last is added when all else is done. It starts from the
// first one, not from 0, so that a sum of -0 keeps its sign.
#pragma once

#include <cstdint>

#include "order/chunking.hpp"

namespace agmm {

/// The owner whose rows `rank` computes at this position, 0 to world_size - 1: those of the next
/// rank first, its own last. So no two ranks send to the same one at a time.
AGMM_HOST_DEVICE constexpr int32_t scatter_owner(int32_t rank, int32_t position,
                                                 int32_t world_size) {
  return (rank + 1 + position) % world_size;
}

/// Where the owner keeps the part of `source`, another rank: 0 to world_size - 2, by their distance
/// in the ring, so that what a rank sees of its peers is the same on every rank.
AGMM_HOST_DEVICE constexpr int32_t part_place(int32_t source, int32_t owner, int32_t world_size) {
  return (source + world_size - owner - 1) % world_size;
}

/// The rows of a call in bands, one after the other through the same memory. A band has as many
/// rows of each rank.
struct ScatterBands {
  /// A band has at most this many rows of all ranks. It bounds the memory: the parts of 16384 x
  /// 8192 in bf16 on 4 ranks take 101 MB, not 201, and a band still is many waves of tiles.
  static constexpr int32_t kMostRows = 8192;

  int32_t world_size = 1;
  int32_t rows_per_rank = 0;  // of the call
  int32_t band_rows = 1;      // of each rank in a band; the last band may have fewer

  ScatterBands() = default;

  /// `rows` is a multiple of `world_size_`.
  AGMM_HOST_DEVICE constexpr ScatterBands(int32_t rows, int32_t world_size_)
      : world_size(world_size_),
        rows_per_rank(rows / world_size_),
        band_rows(max_of(1, min_of(rows / world_size_, kMostRows / world_size_))) {}

  AGMM_HOST_DEVICE constexpr int32_t count() const {
    return rows_per_rank / band_rows + (rows_per_rank % band_rows == 0 ? 0 : 1);
  }

  /// The band's part of each rank's rows, counted from the rank's first.
  AGMM_HOST_DEVICE constexpr Range rows(int32_t band) const {
    int32_t const begin = band * band_rows;
    return {begin, begin + min_of(band_rows, rows_per_rank - begin)};
  }

  /// What a slot holds, in each rank's memory: the largest band's parts from all other ranks.
  AGMM_HOST_DEVICE constexpr int64_t slot_bytes(int64_t row_bytes) const {
    return rows_per_rank == 0 ? 0 : int64_t(world_size - 1) * band_rows * row_bytes;
  }
};

}  // namespace agmm
