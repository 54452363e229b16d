// Which rows of a matmul + reduce-scatter are whose, in which order they are computed, and where
// their sums go. Host and device; the one definition that both backends use.
//
// Every rank computes A @ B for all rows, and keeps the sum over the ranks of its own ones. The
// part that rank s (the source) adds to the rows of rank d (the owner) goes to a slot in the
// owner's memory, rounded once to the element type; the owner's own part stays in its accumulator
// and is not rounded. The owner adds the parts in the order of the ranks, 0 to world_size - 1, its
// own at its place among them, and starts from the first one, not from 0, so that a sum of -0 keeps
// its sign.
#pragma once

#include <cstdint>

#include "order/chunking.hpp"

namespace agmm {

/// The rows of a call in bands, one after the other through the same memory. A band has as many
/// rows of each rank.
struct ScatterBands {
  /// Of all ranks in a band. It bounds the memory: of 16384 x 8192 in bf16 on 4 ranks the parts
  /// take 101 MB, not 201, and a band still is many waves of tiles.
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

  AGMM_HOST_DEVICE constexpr int32_t count() const { return ceil_div(rows_per_rank, band_rows); }

  /// Of each rank's rows, counted from its first.
  AGMM_HOST_DEVICE constexpr Range rows(int32_t band) const {
    return {band * band_rows, min_of((band + 1) * band_rows, rows_per_rank)};
  }

  /// What a slot holds, in each rank's memory: the largest band's parts from all other ranks.
  AGMM_HOST_DEVICE constexpr int64_t slot_bytes(int64_t row_bytes) const {
    return rows_per_rank == 0 ? 0 : int64_t(world_size - 1) * band_rows * row_bytes;
  }
};

/// Which of the parts in the owner's slot is the source's: they lie there in the order of the
/// ranks, without the owner.
AGMM_HOST_DEVICE constexpr int32_t part_place(int32_t source, int32_t owner) {
  return source < owner ? source : source - 1;
}

/// The order of one rank in one band.
struct ScatterOrder {
  int32_t world_size = 1;
  int32_t rank = 0;
  int32_t rows_per_rank = 1;  // in this band

  ScatterOrder() = default;
  AGMM_HOST_DEVICE constexpr ScatterOrder(int32_t world_size_, int32_t rank_,
                                          int32_t rows_per_rank_)
      : world_size(world_size_), rank(rank_), rows_per_rank(rows_per_rank_) {}

  AGMM_HOST_DEVICE constexpr int32_t rows() const { return world_size * rows_per_rank; }

  AGMM_HOST_DEVICE constexpr int32_t owner_of(int32_t row) const { return row / rows_per_rank; }

  AGMM_HOST_DEVICE constexpr Range rows_of(int32_t owner) const {
    return {owner * rows_per_rank, (owner + 1) * rows_per_rank};
  }

  /// The owner whose rows are computed at this position: those of the next rank first, the own
  /// last.
  AGMM_HOST_DEVICE constexpr int32_t owner_at(int32_t position) const {
    int32_t const owner = rank + 1 + position;
    return owner < world_size ? owner : owner - world_size;
  }

  AGMM_HOST_DEVICE constexpr int32_t position_of(int32_t owner) const {
    return owner > rank ? owner - rank - 1 : owner - rank - 1 + world_size;
  }

  AGMM_HOST_DEVICE constexpr int32_t tiles(int32_t tile_rows) const {
    return ceil_div(rows(), tile_rows);
  }

  /// The tile of rows that is computed as the `step`-th. A tile without own rows comes with its
  /// first row's owner, so that all rows of an owner are done when the next owner's begin. Then
  /// come the tiles with own and foreign rows, ascending on every rank, which send before they
  /// wait; then those with own rows alone. So no rank waits for itself: what such a tile awaits
  /// comes from tiles without own rows, which wait for nothing, or from the same tile on a
  /// neighbour, which has waited for lower tiles only.
  AGMM_HOST_DEVICE constexpr int32_t tile_at(int32_t tile_rows, int32_t step) const {
    Range const own = rows_of(rank);
    int32_t const all = tiles(tile_rows);
    int32_t const first = own.begin / tile_rows;       // with own rows,
    int32_t const end = ceil_div(own.end, tile_rows);  // and the one after the last
    int32_t const foreign = all - (end - first);
    if (step < all - end) return end + step;
    if (step < foreign) return step - (all - end);
    int32_t i = step - foreign;
    bool const is_head_mixed = own.begin % tile_rows != 0;
    bool const is_tail_mixed = end * tile_rows > own.end && own.end < rows();
    if (!is_tail_mixed || end - first == 1) return first + i;  // mixed ones are first already
    if (is_head_mixed) {
      if (i == 0) return first;
      i -= 1;
    }
    if (i == 0) return end - 1;
    return first + (is_head_mixed ? 1 : 0) + i - 1;
  }
};

}  // namespace agmm
