// Which tile of a matmul + reduce-scatter is whose, host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "order/chunking.hpp"
#include "order/host_device.hpp"
#include "order/scatter_order.hpp"

namespace agmm {

/// out[rank] = the sum over ranks of chunk `rank` of A @ B. A chunk's rows are padded to whole
/// blocks of tiles, so that no tile has rows of two owners: a tile is either sent whole or stays,
/// and nobody has to send a part of a tile before it waits for another. What that costs is at most
/// a block of rows per chunk, computed in vain.
///
/// "Padded rows" count with that padding: chunk c begins at padded row c * padded.divisor.
///
/// The order of the chunks is scatter_owner()'s, the own one last.
/// Every rank's memory has the same places (part_place): then one rank alone can stand in for all.
struct ScatterTiles {
  int32_t rank = 0;
  int32_t world_size = 1;
  int32_t chunk_stride = 0;  // rows of A from one chunk to the next
  int32_t first_row = 0;     // of each chunk; the rows before belong to another launch
  int32_t rows = 0;          // of each chunk, from there
  FastDiv padded{};          // `rows`, padded
  int32_t tiles_m = 0;       // of a chunk, those that have rows
  int32_t tiles_n = 0;

  ScatterTiles() = default;

  AGMM_HOST_DEVICE ScatterTiles(int32_t rank_, int32_t world_size_, int32_t chunk_stride_,
                                Range rows_, int32_t n, int32_t tile_m, int32_t tile_n,
                                int32_t cluster_m)
      : rank(rank_),
        world_size(world_size_),
        chunk_stride(chunk_stride_),
        first_row(rows_.begin),
        rows(rows_.size()),
        padded(ceil_div(rows_.size(), tile_m * cluster_m) * tile_m * cluster_m),
        tiles_m(ceil_div(rows_.size(), tile_m)),
        tiles_n(ceil_div(n, tile_n)) {}

  AGMM_HOST_DEVICE int32_t padded_rows() const { return world_size * padded.divisor; }
  AGMM_HOST_DEVICE int32_t first_chunk() const { return scatter_owner(rank, 0, world_size); }
  AGMM_HOST_DEVICE int32_t owner(int32_t padded_row) const { return padded.divide(padded_row); }

  /// Row of its chunk's rows at which a tile begins.
  AGMM_HOST_DEVICE int32_t row_of(int32_t padded_row) const { return padded.remainder(padded_row); }
  /// Row of A.
  AGMM_HOST_DEVICE int32_t a_row(int32_t padded_row) const {
    int32_t const chunk = owner(padded_row);
    return chunk * chunk_stride + first_row + padded_row - chunk * padded.divisor;
  }

  /// Tiles of a chunk.
  AGMM_HOST_DEVICE int32_t tiles() const { return tiles_m * tiles_n; }
  /// Tiles of the call: this rank sends or receives them, or they are its own.
  AGMM_HOST_DEVICE int32_t all_tiles() const { return world_size * tiles(); }
  /// Index of a chunk's tile; -1 where it only pads a cluster or the chunk.
  AGMM_HOST_DEVICE int32_t tile(int32_t tile_m, int32_t tile_n) const {
    return tile_m < tiles_m && tile_n < tiles_n ? tile_n * tiles_m + tile_m : -1;
  }

  /// Where this rank keeps what a peer sends, and the peer at such a place.
  AGMM_HOST_DEVICE int32_t place(int32_t source) const {
    return part_place(source, rank, world_size);
  }
  AGMM_HOST_DEVICE int32_t at_place(int32_t place) const {
    return scatter_owner(rank, place, world_size);
  }
  /// The place of the peer whose sums come as the i-th, and are added as the i-th to the own one,
  /// which is not rounded and comes first: its position of this rank's rows is i (scatter_owner).
  AGMM_HOST_DEVICE int32_t place_by_arrival(int32_t i) const { return world_size - 2 - i; }
};

/// Tiles of a chunk in a launch, finished ones counted beside their sums; each has a signal at each
/// place. A band of 4096 rows and 8192 columns has this many tiles of 64 x 64.
constexpr int32_t kMaxScatterTiles = 8192;

/// Words of a launch's claims (claimed_steps.hpp): two counts, then one for each cluster of CTAs,
/// of which a launch has at most one per multiprocessor.
constexpr int32_t kClaimCounts = 2;
constexpr int32_t kClaimWords = kClaimCounts + FirstBlocks::kMostSms;

/// Rows of a chunk that a launch computes: a band (ScatterBands), in whole blocks of tiles.
inline int32_t scatter_band_rows(int32_t chunk_rows, int32_t world_size, KernelShape const& shape) {
  ScatterBands const bands(chunk_rows * world_size, world_size);
  int32_t const block = shape.tile_m * shape.cluster_m;
  int32_t const even = ceil_div(chunk_rows, max_of(bands.count(), 1));
  return min_of(max_of(chunk_rows, 1), ceil_div(even, block) * block);
}

/// Bytes that a rank sends to another in a launch: whole tiles, and in an all-reduce as many
/// finished ones behind them. `rows`: of A.
inline std::size_t scatter_part_bytes(int32_t rows, int32_t n, int32_t world_size,
                                      KernelShape const& shape, bool is_all_reduce = false) {
  int32_t const band = scatter_band_rows(rows / max_of(world_size, 1), world_size, shape);
  constexpr std::size_t kElementBytes = 2;  // of every DType
  return std::size_t(ceil_div(band, shape.tile_m)) * std::size_t(ceil_div(n, shape.tile_n)) *
         std::size_t(shape.tile_m) * std::size_t(shape.tile_n) * kElementBytes *
         (is_all_reduce ? 2 : 1);
}

}  // namespace agmm
