// The work of a streaming kernel: how the matmul of few rows is cut, so that every byte of B is
// read once, by CTAs that all end at about the same time. Host and device.
#pragma once

#include <cstdint>

#include "agmm/problem.hpp"
#include "order/chunking.hpp"
#include "order/clusters.hpp"

namespace agmm {

/// The columns of A in one stage of a streaming kernel, of which a split of K has a multiple. Sums
/// are the same bits with every tile, since each has the same splits.
constexpr int32_t kStreamedK = 128;
/// The columns of out in one wgmma's rows.
constexpr int32_t kStreamedColumns = 64;
/// The packets in which a row's sums of so many columns travel, 6 columns of 16 bits in each.
constexpr int32_t kUnitPackets = 11;
/// The most packets that a rank sends to another in a step, of a product of so many rows and
/// columns, where each of so many ranks sums an equal share of them.
AGMM_HOST_DEVICE constexpr int64_t streamed_packets(int64_t m, int32_t n, int owners) {
  return (m * ceil_div(n, kStreamedColumns) * kUnitPackets + owners - 1) / owners;
}
/// The most columns of a row that a streaming kernel norms: it holds the row's packets and as many
/// of the norm's weight in its ring of B's stages, whose smallest one has 96 KiB.
constexpr int32_t kMaxStreamedNormColumns = 23 << 10;
constexpr int32_t streamed_norm_bytes(int32_t n) {
  return 2 * ceil_div(n, kStreamedColumns) * kUnitPackets * 12;
}
/// The largest cluster of CTAs that every Hopper runs.
constexpr int32_t kMaxStreamingCluster = 8;

/// How many clusters a launch has for so many blocks: as many as make all of them compute the same
/// number of blocks, but for one, in as few rounds as there is room for.
AGMM_HOST_DEVICE constexpr int32_t streaming_clusters(int32_t blocks, int32_t at_once) {
  int32_t const rounds = ceil_div(blocks, max_of(1, at_once));
  return ceil_div(blocks, max_of(1, rounds));
}

/// The splits of K for a B of this size, whatever the number of rows, the GPU and what else runs on
/// it: so a row's sum has the same bits in every call. They are those with which reading B is
/// expected to take the least time: one multiprocessor takes no more than so much, and CTAs that
/// add up take a while. On an H200 they are within 2% of the fastest of 1 to 8 splits for 13
/// weights of 16 bits. `element_bits`: those of B's elements.
constexpr int32_t streaming_splits(int32_t n, int32_t k, int32_t element_bits = 16) {
  constexpr int64_t kBytesPerNs = 4300;     // of an H200's memory
  constexpr int64_t kBytesPerNsAndSm = 60;  // of one multiprocessor
  constexpr int64_t kAddingUpNs = 900;
  constexpr int32_t kSms = 132;  // of a Hopper
  int32_t const tiles = ceil_div(n, kStreamedColumns);
  int32_t const k_tiles = ceil_div(k, kStreamedK);
  int64_t const all_ns = int64_t(n) * k * element_bits / (8 * kBytesPerNs);
  int32_t best = 1;
  int64_t best_ns = INT64_MAX;
  for (int32_t splits = 1; splits <= min_of(kMaxStreamingCluster, k_tiles); ++splits) {
    int32_t const rounds = ceil_div(tiles, clusters_at_once(kSms, splits));
    int64_t const bytes = int64_t(rounds) * kStreamedColumns * ceil_div(k_tiles, splits) *
                          kStreamedK * element_bits / 8;
    int64_t const of_cta_ns = bytes / kBytesPerNsAndSm;
    int64_t const ns = (of_cta_ns > all_ns ? of_cta_ns : all_ns) + (splits > 1 ? kAddingUpNs : 0);
    if (ns < best_ns) {
      best = splits;
      best_ns = ns;
    }
  }
  return best;
}

}  // namespace agmm
