// B as two weights, gate and up, that lie anywhere: a tile has as many columns of each, so that a
// thread holds the sums of both for the same place of out.
#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "gemm/sm90/box_descriptor.hpp"

namespace agmm {

/// What a mainloop of two weights is given beside the usual arguments, which have the first's.
template <bool kIsGated>
struct HalvesArguments {};
template <>
struct HalvesArguments<true> {
  void const* ptr_B_up = nullptr;
  int64_t ldb_up = 0;
};

struct HalvesParams {
  cute::TmaDescriptor gate;
  cute::TmaDescriptor up;
};

/// The loads of B. The two CTAs of a cluster that share B load a half each, for both; a CTA alone
/// loads both.
template <class Element, class Stride, class SmemLayout, class TileShape, class ClusterShape>
struct HalvesOfB {
  static constexpr int kColumns = cute::size<1>(TileShape{}) / 2;  // of one weight in a tile
  static constexpr int kTileK = cute::size<2>(TileShape{});
  static constexpr bool kIsShared = cute::size<0>(ClusterShape{}) == 2;
  static_assert(cute::size<1>(ClusterShape{}) == 1 && cute::size<0>(ClusterShape{}) <= 2);
  /// Whether neighbours lie along K, as in a column-major B.
  static constexpr bool kAlongK =
      !cute::is_static<cute::remove_cvref_t<decltype(cute::get<0>(Stride{}))>>::value;
  static constexpr int kSwizzled = 128 / sizeof(Element);  // neighbours in a box
  /// The columns that one TMA instruction loads.
  static constexpr int kPiece = kAlongK ? kColumns : kSwizzled;
  static_assert(kTileK == kSwizzled && kColumns % kPiece == 0);
  // Pieces lie one after the other in shared memory, each with all of a k tile.
  static_assert(SmemLayout{}(cute::Int<kColumns>{}, cute::_0{}, cute::_0{}) == kColumns * kTileK);
  static_assert(SmemLayout{}(cute::Int<kPiece>{}, cute::_0{}, cute::_0{}) == kPiece * kTileK);

  static constexpr Extent extent(int32_t columns, int32_t k) {
    return kAlongK ? Extent{k, columns} : Extent{columns, k};
  }

  static Stride stride(int64_t leading) {
    Stride found{};
    cute::get<kAlongK ? 0 : 1>(found) = leading;
    return found;
  }

  static cute::TmaDescriptor descriptor(void const* weight, int32_t columns, int32_t k,
                                        Stride const& stride) {
    return box_descriptor(static_cast<Element const*>(weight), extent(columns, k),
                          cute::get<kAlongK ? 0 : 1>(stride), extent(kPiece, kTileK));
  }

  /// Loads this CTA's part of a tile into a stage. cta: the CTA's number in the cluster.
  CUTLASS_DEVICE static void load(HalvesParams const& params, uint64_t* barrier, uint16_t ctas,
                                  uint32_t cta, Element* stage, int32_t tile, int32_t k_tile) {
    if constexpr (kIsShared) {
      load_half(cta == 0 ? &params.gate : &params.up, barrier, ctas,
                stage + cta * (kColumns * kTileK), tile, k_tile);
    } else {
      load_half(&params.gate, barrier, ctas, stage, tile, k_tile);
      load_half(&params.up, barrier, ctas, stage + kColumns * kTileK, tile, k_tile);
    }
  }

 private:
  CUTLASS_DEVICE static void load_half(cute::TmaDescriptor const* weight, uint64_t* barrier,
                                       uint16_t ctas, Element* to, int32_t tile, int32_t k_tile) {
    using namespace cute;
    constexpr auto kHint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
    CUTLASS_PRAGMA_UNROLL
    for (int piece = 0; piece < kColumns; piece += kPiece) {
      Extent const from = extent(tile * kColumns + piece, k_tile * kTileK);
      Element* const there = to + piece * kTileK;
      if constexpr (kIsShared) {
        SM90_TMA_LOAD_MULTICAST_2D::copy(weight, barrier, ctas, kHint, there, from.along,
                                         from.across);
      } else {
        SM90_TMA_LOAD_2D::copy(weight, barrier, kHint, there, from.along, from.across);
      }
    }
  }
};

}  // namespace agmm
