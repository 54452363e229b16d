// The tiles of a grouped matmul: rows that are grouped by expert, each expert's multiplied with its
// own matrix. The one definition that the kernel and the model of its schedule use, host and
// device.
#pragma once

#include <cstdint>

#include "order/chunking.hpp"
#include "order/host_device.hpp"

namespace agmm {

/// The most experts of a launch, whose blocks a kernel counts in shared memory.
constexpr int32_t kMostExperts = 512;
/// The rows of a band: neighbouring blocks share these rows and go along the columns of out
/// together, so that L2 holds both what they share of A and what they share of B.
constexpr int32_t kBandRows = 2048;
/// Tiles load and multiply rows in quarters of their height. A tile that is not full takes no more
/// of them than it needs.
constexpr int32_t kTileQuarters = 4;

/// The rows of a tile of an expert.
struct GroupedRows {
  Range rows;             // of A and out, all of one expert
  int32_t first_row = 0;  // that is loaded; those outside `rows` are not stored
  int32_t quarters = 0;   // of the tile's height that are loaded
};

/// A block: the tiles of a cluster, which lie beside one another, so they are one expert's.
struct GroupedBlock {
  int32_t expert = 0;
  GroupedRows rows;
  int32_t column_block = 0;
};

/// The order of all blocks of a launch: expert after expert, band after band, and in a band the
/// blocks of the same columns one after the other.
struct GroupedOrder {
  int32_t rows = 0;  // that A and out have room for
  int32_t experts = 0;
  int32_t tile_rows = 1;
  FastDiv column_blocks{};
  FastDiv blocks_of_band{};

  GroupedOrder() = default;

  GroupedOrder(int32_t rows_, int32_t experts_, int32_t columns, int32_t tile_rows_,
               int32_t block_columns)
      : rows(rows_),
        experts(experts_),
        tile_rows(tile_rows_),
        column_blocks(ceil_div(columns, block_columns)),
        blocks_of_band(band_tiles() * column_blocks.divisor) {}

  AGMM_HOST_DEVICE int32_t band_tiles() const { return max_of(1, kBandRows / tile_rows); }

  /// The most blocks that any offsets make. Those of an expert that has rows are at most one
  /// more in height than its rows fill; offsets that are none could give every expert all rows.
  int64_t most_blocks(bool are_offsets_right) const {
    int64_t const full = ceil_div(rows, tile_rows);
    int64_t const tiles = are_offsets_right ? full + min_of(experts, rows) : full * experts;
    return tiles * column_blocks.divisor;
  }

  /// The rows of an expert by its offsets. Offsets that are wrong give rows that exist, or none.
  AGMM_HOST_DEVICE Range rows_of_expert(int32_t begin, int32_t end) const {
    int32_t const first = min_of(max_of(begin, 0), rows);
    return {first, min_of(max_of(end, first), rows)};
  }

  AGMM_HOST_DEVICE int32_t blocks_of_expert(Range of_expert) const {
    return ceil_div(of_expert.size(), tile_rows) * column_blocks.divisor;
  }

  /// The rows of a tile of an expert. Its loads begin further up where they would reach beyond the
  /// last row of A: TMA fills rows that do not exist slowly.
  AGMM_HOST_DEVICE GroupedRows tile_of_expert(Range of_expert, int32_t tile) const {
    int32_t const begin = of_expert.begin + tile * tile_rows;
    int32_t const end = min_of(begin + tile_rows, of_expert.end);
    int32_t const quarter = tile_rows / kTileQuarters;
    int32_t const quarters = ceil_div(end - begin, quarter);
    int32_t const first = max_of(0, min_of(begin, rows - quarters * quarter));
    return {{begin, end}, first, quarters};
  }

  /// Block `number` of an expert that has these rows. Its tiles begin with the one that holds
  /// `first_row`, and go on with the first behind the last.
  AGMM_HOST_DEVICE GroupedBlock block_of_expert(int32_t expert, Range of_expert, int32_t number,
                                                int32_t first_row) const {
    int32_t const band = blocks_of_band.divide(number);
    int32_t const in_band = number - band * blocks_of_band.divisor;
    int32_t const first_tile = band * band_tiles();
    int32_t const tiles = min_of(band_tiles(), ceil_div(of_expert.size(), tile_rows) - first_tile);
    int32_t const column_block = PlainDiv(tiles).divide(in_band);
    int32_t const all_tiles = ceil_div(of_expert.size(), tile_rows);
    int32_t const pivot = min_of(max_of(0, first_row - of_expert.begin) / tile_rows, all_tiles - 1);
    int32_t tile = first_tile + in_band - column_block * tiles + pivot;
    if (tile >= all_tiles) tile -= all_tiles;
    return {expert, tile_of_expert(of_expert, tile), column_block};
  }
};

/// The expert to which a block belongs: the last one that begins at it or before. `first_block` has
/// the first block of each expert, then the number of all; experts without rows begin where the
/// next one does.
AGMM_HOST_DEVICE int32_t expert_of_block(int32_t const* first_block, int32_t experts,
                                         int32_t block) {
  int32_t low = 0;
  int32_t high = experts;  // first_block[low] <= block < first_block[high]
  while (high - low > 1) {
    int32_t const middle = (low + high) / 2;
    if (first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace agmm
