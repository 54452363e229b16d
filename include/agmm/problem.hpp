// The structs that describe a problem and how it is to be computed. Plain data; they print
// themselves.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "order/chunking.hpp"

namespace agmm {

enum class DType : int32_t { BFloat16 = 0, Float16 = 1 };
enum class BLayout : int32_t { RowMajor = 0, ColumnMajor = 1 };
enum class Schedule : int32_t { Cooperative = 0, Pingpong = 1 };

inline char const* to_string(DType d) { return d == DType::BFloat16 ? "bf16" : "fp16"; }
inline char const* to_string(BLayout l) { return l == BLayout::RowMajor ? "row" : "col"; }
inline char const* to_string(Schedule s) {
  return s == Schedule::Cooperative ? "cooperative" : "pingpong";
}
inline char const* to_string(Raster r) { return r == Raster::AlongM ? "along_m" : "along_n"; }

/// out[m, n] = A[m, k] @ B[k, n] + bias[n]
struct Problem {
  int32_t m = 0;
  int32_t n = 0;
  int32_t k = 0;
  DType dtype = DType::BFloat16;
  BLayout b_layout = BLayout::ColumnMajor;

  std::string str() const {
    return std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k) + " " +
           to_string(dtype) + " B " + to_string(b_layout);
  }
};

/// What is compiled in: the tile that one CTA computes, the cluster, the warp-specialised schedule.
struct KernelShape {
  int32_t tile_m = 128;
  int32_t tile_n = 128;
  int32_t tile_k = 64;
  int32_t cluster_m = 1;
  int32_t cluster_n = 1;
  Schedule schedule = Schedule::Pingpong;
  bool timed = false;  // records agmm::TileTimes; a variant for pictures, never chosen

  std::string str() const {
    return std::to_string(tile_m) + "x" + std::to_string(tile_n) + "x" + std::to_string(tile_k) +
           "_" + std::to_string(cluster_m) + "x" + std::to_string(cluster_n) + "_" +
           to_string(schedule) + (timed ? "_timed" : "");
  }
};
inline bool operator==(KernelShape const& a, KernelShape const& b) {
  auto const fields = [](KernelShape const& shape) {
    // A structured binding wants all of them, so none can be forgotten.
    auto const& [tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, timed] = shape;
    return std::tie(tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, timed);
  };
  return fields(a) == fields(b);
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
  /// takes 1 to 3% less time; with fewer still, or a wave more after a late chunk, up to 15% more.
  /// All with more chunks than kMostChunks, since looking at each would take long.
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
  static constexpr int32_t kMostChunks = 16;

  static int64_t waves_of(int64_t blocks, int64_t workers) {
    return (blocks + workers - 1) / workers;
  }
};

/// A kernel shape and what may change from launch to launch.
struct KernelConfig {
  KernelShape shape{};
  int32_t max_swizzle = 1;
  Raster raster = Raster::AlongM;
  int32_t splits = 1;  // of K: so many CTAs compute a tile together
};

}  // namespace agmm
