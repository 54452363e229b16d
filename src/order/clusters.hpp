// How many clusters of CTAs a problem takes.
#pragma once

#include <cstdint>

#include "agmm/problem.hpp"
#include "order/chunking.hpp"

namespace agmm {

/// The number of clusters of so many CTAs that a Hopper with so many multiprocessors runs at once:
/// a cluster lies within a GPC, GPCs differ in size, and what is left of each stays idle. For
/// clusters of more than 2 it is what the driver of an H100 says, which has 132.
AGMM_HOST_DEVICE constexpr int32_t clusters_at_once(int32_t sms, int32_t ctas) {
  constexpr int32_t kSms = 132;
  constexpr int32_t kAtOnce[] = {39, 30, 22, 17, 15, 15};  // of 3 CTAs and more
  if (ctas <= 2) return sms / ctas;
  return ctas <= 8 ? int32_t(int64_t(kAtOnce[ctas - 3]) * sms / kSms) : 0;
}

/// The blocks of a problem, each what a cluster of CTAs computes at a time, and how many clusters
/// there is room for.
struct Clusters {
  int32_t block_rows = 1;
  int32_t blocks_m = 0;
  int32_t blocks_n = 0;
  int32_t at_once = 1;

  Clusters(int32_t m, int32_t n, int32_t block_rows_, int32_t block_cols, int32_t at_once_)
      : block_rows(block_rows_),
        blocks_m(ceil_div(m, block_rows_)),
        blocks_n(ceil_div(n, block_cols)),
        at_once(max_of(1, at_once_)) {}

  Clusters(Problem const& p, KernelShape const& s, int32_t sm_count)
      : Clusters(p.m, p.n, s.tile_m * s.cluster_m, s.tile_n * s.cluster_n,
                 sm_count / (s.cluster_m * s.cluster_n)) {}

  int64_t blocks() const { return int64_t(blocks_m) * blocks_n; }

  /// How many clusters to launch. Not all that there is room for where 3 to 15% fewer do with the
  /// same number of waves, three or more, whichever of the chunks are still to come, on any rank:
  /// the last wave is then nearly full, and what is left idle saves power and cache. On H200 that
  /// takes 1 to 3% less time (median of 39 shapes); with fewer still, or a wave more after a late
  /// chunk, up to 16% more. All with more chunks than kMostChunks, since
  /// looking at each would take long.
  int32_t to_launch(ChunkGrid const& chunks) const {
    int64_t const waves = waves_of(blocks(), at_once);
    int64_t const needed = (blocks() + waves - 1) / waves;
    if (waves < 3 || needed * 33 > int64_t(at_once) * 32 || needed * 33 < int64_t(at_once) * 28 ||
        chunks.chunks_m > kMostChunks) {
      return at_once;
    }
    for (int32_t pivot = 0; pivot < chunks.chunks_m; ++pivot) {
      TileOrder const order(chunks, blocks_n, block_rows, 1, pivot, 1, Raster::AlongM);
      for (int32_t position = 1; position < chunks.chunks_m; ++position) {
        int64_t const left = int64_t(blocks_m - order.group_begin(position)) * blocks_n;
        if (waves_of(left, at_once) != waves_of(left, needed)) return at_once;
      }
    }
    return static_cast<int32_t>(needed);
  }

 private:
  static constexpr int32_t kMostChunks = 16;  // looked at from each of them, once per new call

  static int64_t waves_of(int64_t blocks, int64_t workers) {
    return (blocks + workers - 1) / workers;
  }
};

}  // namespace agmm
