// Chunk and tile arithmetic, host and device. The one definition that the scheduler, the mainloop,
// the transports, the CPU backend and the tests all use.
#pragma once

#include <cstdint>

#include "agmm/problem.hpp"
#include "order/host_device.hpp"

namespace agmm {

AGMM_HOST_DEVICE constexpr int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }
AGMM_HOST_DEVICE constexpr int32_t min_of(int32_t a, int32_t b) { return a < b ? a : b; }
AGMM_HOST_DEVICE constexpr int32_t max_of(int32_t a, int32_t b) { return a > b ? a : b; }
// Other types would be narrowed without a word.
template <class A, class B>
int32_t ceil_div(A, B) = delete;
template <class A, class B>
int32_t min_of(A, B) = delete;
template <class A, class B>
int32_t max_of(A, B) = delete;

/// Division of 0 <= n < 2^31 by a divisor fixed at construction: one multiply and one shift, so
/// that the tile mapping costs tens of cycles per tile, not hundreds (Granlund and Montgomery,
/// 1994).
struct FastDiv {
  int32_t divisor = 1;
  uint32_t multiplier = 0;
  uint32_t shift = 0;

  FastDiv() = default;

  AGMM_HOST_DEVICE explicit FastDiv(int32_t d) : divisor(d) {
    if (d == 1) return;
    uint32_t log2_ceil = 0;
    while ((int64_t(1) << log2_ceil) < d) ++log2_ceil;
    uint32_t const p = 31 + log2_ceil;
    multiplier = static_cast<uint32_t>(((uint64_t(1) << p) + uint64_t(d) - 1) / uint64_t(d));
    shift = p - 32;
  }

  AGMM_HOST_DEVICE int32_t divide(int32_t n) const {
    if (divisor == 1) return n;
    uint64_t const high = (uint64_t(uint32_t(n)) * uint64_t(multiplier)) >> 32;
    return static_cast<int32_t>(uint32_t(high) >> shift);
  }

  AGMM_HOST_DEVICE int32_t remainder(int32_t n) const { return n - divide(n) * divisor; }
};

/// The interface of FastDiv for a divisor that is known too late to prepare.
struct PlainDiv {
  int32_t divisor = 1;
  AGMM_HOST_DEVICE explicit PlainDiv(int32_t d) : divisor(d) {}
  AGMM_HOST_DEVICE int32_t divide(int32_t n) const { return n / divisor; }
};

struct Range {
  int32_t begin = 0;
  int32_t end = 0;
  AGMM_HOST_DEVICE bool empty() const { return begin >= end; }
  AGMM_HOST_DEVICE int32_t size() const { return empty() ? 0 : end - begin; }
  AGMM_HOST_DEVICE bool contains(Range other) const {
    return begin <= other.begin && other.end <= end;
  }
};

/// The k tiles of each split of K. The last split is longer: the others have left their
/// sums where it finds them when it ends.
struct KSplits {
  // Measured on 2 H200 as 4 ranks, 512 x 3584 x 8192: 0, 4, 8, 12, 16 give 62.9, 62.7, 62.0, 63.5,
  // 64.8 us. Less than the best of halves, since with thirds a lead costs more.
  static constexpr int32_t kLead = 6;

  int32_t k_tiles = 1;
  int32_t splits = 1;  // at most k_tiles
  int32_t length = 1;  // of all but the last

  KSplits() = default;

  AGMM_HOST_DEVICE KSplits(int32_t k_tiles_, int32_t splits_)
      : k_tiles(k_tiles_),
        splits(splits_),
        length(max_of(1, (k_tiles_ - min_of(kLead, k_tiles_ / 8)) / splits_)) {}

  AGMM_HOST_DEVICE Range split(int32_t i) const {
    return {i * length, i + 1 == splits ? k_tiles : (i + 1) * length};
  }

  /// The splits where all end at once: none is longer than another by more than a k tile.
  AGMM_HOST_DEVICE Range even_split(int32_t i, FastDiv const& splits_) const {
    return {splits_.divide(i * k_tiles), splits_.divide((i + 1) * k_tiles)};
  }

  /// Chunks of columns from the beginning of one split to that of the next, `are_even` as
  /// even_split() has them. No more than their share: k tiles are whole, also where K ends inside
  /// the last.
  AGMM_HOST_DEVICE int32_t stretch_chunks(int32_t tile_k, int32_t columns_per_chunk, int32_t chunks,
                                          bool are_even) const {
    int32_t const shortest = are_even ? k_tiles / splits : length;
    return min_of(shortest * tile_k / columns_per_chunk, chunks / splits);
  }
};

/// Column chunks of a shard: more than the longest K in use has in chunks as small as the planner
/// takes. Each costs a signal per rank and slot.
constexpr int32_t kMaxColumnChunks = 128;

/// A [rows, depth] cut into chunks_m x chunks_k chunks. Chunk (i, j) has the signal i * chunks_k +
/// j.
struct ChunkGrid {
  static constexpr int32_t kColumnGranule = kAlignment;  // chunks begin at 16-byte addresses

  int32_t rows = 0;
  int32_t depth = 0;
  int32_t chunks_m = 1;
  int32_t chunks_k = 1;
  FastDiv rows_per_chunk{};
  int32_t columns_per_chunk = 1;

  ChunkGrid() = default;

  AGMM_HOST_DEVICE ChunkGrid(int32_t rows_, int32_t depth_, int32_t chunks_m_,
                             int32_t chunks_k_ = 1)
      : rows(rows_),
        depth(depth_),
        chunks_m(chunks_m_),
        chunks_k(chunks_k_),
        rows_per_chunk(max_of(1, ceil_div(rows_, chunks_m_))),
        columns_per_chunk(kColumnGranule *
                          max_of(1, ceil_div(ceil_div(depth_, chunks_k_), kColumnGranule))) {}

  AGMM_HOST_DEVICE int32_t count() const { return chunks_m * chunks_k; }

  /// Whether every chunk has rows and columns; the last ones may have fewer than the others.
  AGMM_HOST_DEVICE bool is_legal() const {
    return chunks_m >= 1 && chunks_k >= 1 &&
           int64_t(chunks_m - 1) * rows_per_chunk.divisor < rows &&
           int64_t(chunks_k - 1) * columns_per_chunk < depth;
  }

  /// The row chunks that the rows touch. Rows past the end of A touch none, so a tile that only
  /// pads the grid never names a signal.
  AGMM_HOST_DEVICE Range row_chunks(Range r) const {
    int32_t const end = min_of(r.end, rows);
    if (r.begin >= end) return {0, 0};
    return {rows_per_chunk.divide(r.begin), rows_per_chunk.divide(end - 1) + 1};
  }

  AGMM_HOST_DEVICE int32_t signal_index(int32_t chunk_m, int32_t chunk_k) const {
    return chunk_m * chunks_k + chunk_k;
  }

  AGMM_HOST_DEVICE Range chunk_columns(int32_t chunk_k) const {
    int32_t const begin = chunk_k * columns_per_chunk;
    return {min_of(begin, depth), min_of(begin + columns_per_chunk, depth)};
  }

  AGMM_HOST_DEVICE Range chunk_rows(int32_t chunk_m) const {
    int32_t const begin = chunk_m * rows_per_chunk.divisor;
    return {min_of(begin, rows), min_of(begin + rows_per_chunk.divisor, rows)};
  }
};

struct BlockCoord {
  int32_t m = 0;
  int32_t n = 0;
};

/// The order in which blocks of output are computed. A block is what one cluster computes at a
/// time: block_rows x block_cols elements of out, so a block never splits a cluster.
///
/// Blocks are taken in groups, one group for each chunk of rows, around the ring from the pivot
/// chunk: all blocks that the pivot chunk completes, then all that need the next chunk too, and so
/// on. A block that touches several chunks belongs to the one that arrives last. Raster and swizzle
/// stay inside a group, so early waves need only what has arrived. Invariants (tested on the CPU
/// for thousands of random problems): steps [0, count()) visit every block exactly once, and the
/// arrival position of the last chunk that a step needs never decreases.
///
/// What is known of a group beforehand stands in a table: each warp of the kernel has to know its
/// first tile before it can do anything else, and the consumers each next one before they can go
/// on.
struct TileOrder {
  // There are as many chunks of rows as a host has GPUs; each group takes 32 bytes of the kernel's
  // parameters.
  static constexpr int32_t kTabledGroups = 8;

  /// Rows of blocks, counted from the pivot.
  template <class Div>
  struct Group {
    int32_t begin = kNever;
    int32_t rows = 0;
    Div band{1};        // blocks of a whole band
    Div last_width{1};  // of the last band, where it is not whole
  };

  int32_t blocks_m = 0;
  int32_t blocks_n = 0;
  int32_t pivot_chunk = 0;
  int32_t pivot_block = 0;  // first block that starts inside the pivot chunk; may equal blocks_m
  int32_t log_swizzle = 0;
  Raster raster = Raster::AlongM;
  bool pivot_splits_block = false;  // one block has rows of the pivot chunk and of the last one
  ChunkGrid chunks{};
  FastDiv block_rows{};
  FastDiv div_blocks_n{};
  Group<FastDiv> groups[kTabledGroups];  // all of them, if there are no more

  TileOrder() = default;

  AGMM_HOST_DEVICE TileOrder(ChunkGrid const& chunks_, int32_t n, int32_t block_rows_,
                             int32_t block_cols, int32_t pivot_chunk_, int32_t max_swizzle,
                             Raster raster_)
      : blocks_m(ceil_div(chunks_.rows, block_rows_)),
        blocks_n(ceil_div(n, block_cols)),
        pivot_chunk(pivot_chunk_),
        raster(raster_),
        chunks(chunks_),
        block_rows(block_rows_) {
    int32_t const pivot_row = min_of(pivot_chunk * chunks.rows_per_chunk.divisor, chunks.rows);
    pivot_block = ceil_div(pivot_row, block_rows_);
    pivot_splits_block = pivot_row % block_rows_ != 0;
    int32_t const minor = raster == Raster::AlongN ? blocks_m : blocks_n;
    while (log_swizzle < 3 && (2 << log_swizzle) <= max_swizzle && (2 << log_swizzle) <= minor) {
      ++log_swizzle;
    }
    div_blocks_n = FastDiv(max_of(1, blocks_n));
    for (int32_t i = 0; i < min_of(chunks.chunks_m, kTabledGroups); ++i)
      groups[i] = group<FastDiv>(i);
  }

  AGMM_HOST_DEVICE int32_t count() const { return blocks_m * blocks_n; }

  AGMM_HOST_DEVICE Range block_row_range(int32_t block_m) const {
    int32_t const begin = block_m * block_rows.divisor;
    return {begin, min_of(begin + block_rows.divisor, chunks.rows)};
  }

  /// First row of blocks, counted from the pivot, that belongs to the chunk at this ring position.
  AGMM_HOST_DEVICE int32_t group_begin(int32_t position) const {
    if (position == 0) return 0;
    if (position >= chunks.chunks_m) return blocks_m;
    int32_t chunk = pivot_chunk + position;
    bool const wrapped = chunk >= chunks.chunks_m;
    if (wrapped) chunk -= chunks.chunks_m;
    int32_t const first = block_rows.divide(chunk * chunks.rows_per_chunk.divisor);
    return wrapped ? first + blocks_m - pivot_block : max_of(0, first - pivot_block);
  }

  /// Ring position of the group of a row of blocks, counted from the pivot.
  AGMM_HOST_DEVICE int32_t group_of(int32_t row_from_pivot) const {
    if (pivot_splits_block && row_from_pivot == blocks_m - 1) return chunks.chunks_m - 1;
    int32_t block = row_from_pivot + pivot_block;
    if (block >= blocks_m) block -= blocks_m;
    int32_t const last_chunk = chunks.rows_per_chunk.divide(block_row_range(block).end - 1);
    int32_t const position = last_chunk - pivot_chunk;
    return position < 0 ? position + chunks.chunks_m : position;
  }

  template <class Div>
  AGMM_HOST_DEVICE Group<Div> group(int32_t position) const {
    int32_t const begin = group_begin(position);
    int32_t const rows = group_begin(position + 1) - begin;
    int32_t const whole = 1 << log_swizzle;
    return {begin, rows, Div(max_of(1, length(rows) * whole)),
            Div(max_of(1, minor_extent(rows) % whole))};
  }

  AGMM_HOST_DEVICE BlockCoord block_at(int32_t step) const {
    int32_t const row = div_blocks_n.divide(step);
    if (chunks.chunks_m > kTabledGroups) return block_of(step, group<PlainDiv>(group_of(row)));
    int32_t found = 0;
    for (int32_t i = 1; i < kTabledGroups; ++i) found += row >= groups[i].begin ? 1 : 0;
    return block_of(step, groups[found]);
  }

 private:
  static constexpr int32_t kNever = 0x7fffffff;

  // Bands of 2^log_swizzle blocks across the minor direction; the last band is only as wide as what
  // is left, so no padded block is ever computed.
  AGMM_HOST_DEVICE int32_t length(int32_t rows) const {
    return raster == Raster::AlongN ? blocks_n : rows;
  }
  AGMM_HOST_DEVICE int32_t minor_extent(int32_t rows) const {
    return raster == Raster::AlongN ? rows : blocks_n;
  }

  template <class Div>
  AGMM_HOST_DEVICE BlockCoord block_of(int32_t step, Group<Div> const& group) const {
    int32_t const local = step - group.begin * blocks_n;
    int32_t const band_begin = group.band.divide(local) << log_swizzle;
    int32_t const in_band = local - band_begin * length(group.rows);
    bool const is_whole = minor_extent(group.rows) - band_begin >= 1 << log_swizzle;
    int32_t const width = is_whole ? 1 << log_swizzle : group.last_width.divisor;
    int32_t const major = is_whole ? in_band >> log_swizzle : group.last_width.divide(in_band);
    int32_t const minor = band_begin + in_band - major * width;

    int32_t m = group.begin + (raster == Raster::AlongN ? minor : major) + pivot_block;
    if (m >= blocks_m) m -= blocks_m;
    return {m, raster == Raster::AlongN ? major : minor};
  }
};

/// The first blocks of an order, those of two waves: a warp of the kernel knows its first tile by
/// one load from the kernel's parameters, where block_at() takes some 200 instructions, each of
/// which waits for the one before. The second warpgroup of a pingpong kernel begins with the second
/// wave.
struct FirstBlocks {
  static constexpr int32_t kMostSms = 144;  // a whole GH100 has 144 multiprocessors, an H100 132
  static constexpr int32_t kMost = 2 * kMostSms;

  BlockCoord blocks[kMost];

  FirstBlocks() = default;

  /// Fills in as many blocks as `steps`, kMost and the order allow.
  template <class Order>
  FirstBlocks(Order const& order, int32_t steps) {
    int32_t const count = min_of(min_of(steps, kMost), order.count());
    for (int32_t i = 0; i < count; ++i) blocks[i] = order.block_at(i);
  }
};

/// The rows of a shard that tiles share with a neighbouring shard: at most one stretch at its head
/// and one at its tail. Such tiles read gathered A for all their rows, so only these rows of the
/// local shard must be copied there.
struct SharedRows {
  Range head{};
  Range tail{};
};

AGMM_HOST_DEVICE SharedRows shared_rows(Range shard, int32_t tile_rows, int32_t total_rows) {
  SharedRows shared;
  int32_t const first_whole = min_of(shard.end, ceil_div(shard.begin, tile_rows) * tile_rows);
  int32_t const last_whole =
      shard.end == total_rows ? shard.end : shard.end / tile_rows * tile_rows;
  shared.head = {shard.begin, first_whole};
  shared.tail = {max_of(last_whole, first_whole), shard.end};
  return shared;
}

}  // namespace agmm
