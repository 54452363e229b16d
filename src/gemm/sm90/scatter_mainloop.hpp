// The mainloop of matmul + reduce-scatter: CUTLASS's sm90 collective with other rows for its tiles,
// and with several products whose sum it computes.
#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "gemm/scatter_spec.hpp"
#include "gemm/sm90/block_scales.hpp"
#include "gemm/sm90/promoting_mma.hpp"
#include "gemm/sm90/tile_timer.hpp"
#include "order/scatter_tiles.hpp"

namespace agmm {

/// kSplits: a CTA may compute a split of the k tiles alone. kTimed: records ScatterTimes.
template <class Base, bool kSplits, bool kTimed, Accumulation kAccumulation = Accumulation::Fast>
struct ScatterMainloop : Base {
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TileShape;
  static constexpr int kMaxProducts = ScatterSpec::kMaxProducts;
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr int kTileK = cute::size<2>(TileShape{});

  /// Block scales are the mainloop's, not the epilogue's. They are this rank's own, and there
  /// before the kernel starts.
  using Scaling = MainloopScales<Base, kAccumulation>;
  static constexpr bool kScalesBlocks = Scaling::kScalesBlocks;
  static_assert(!kScalesBlocks || !kSplits);
  using ScalesOfBlocks = typename Scaling::Scales;
  struct TensorStorage : Base::TensorStorage, Scaling::Storage {};
  /// The scales of the only product.
  struct BlockScaleParams {
    BlockScaleArgs block_scales;
  };
  using ScaleParams = cute::conditional_t<kScalesBlocks, BlockScaleParams, typename Scaling::None>;

  /// A_i is [rows, k], all with the same rows, B_i [k, n].
  struct Product {
    typename Base::Arguments operands{};
    int32_t k = 0;
  };

  struct Arguments {
    Product products[kMaxProducts]{};
    int32_t count = 1;
    int32_t rows = 0;
    ScatterTiles tiles{};
    ScatterTimes* times = nullptr;
    ScaleParams scales{};
  };

  struct Params : Base::Params, ScaleParams {  // of the first product
    typename Base::Params others[kMaxProducts - 1];
    int32_t k_tiles[kMaxProducts];
    int32_t count;
    ScatterTiles tiles;
    ScatterTimes* times;
  };

  /// k tiles of all products: none has columns of two.
  static int32_t all_k_tiles(Arguments const& args) {
    int32_t all = 0;
    for (int i = 0; i < args.count; ++i) all += ceil_div(args.products[i].k, kTileK);
    return all;
  }

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args,
                                        void* workspace) {
    auto const of = [&](int i) {
      Product const& product = args.products[i < args.count ? i : 0];
      auto const own =
          cute::make_shape(args.rows, int32_t(cute::get<1>(problem)), product.k, int32_t(1));
      return Base::to_underlying_arguments(own, product.operands, workspace);
    };
    Params params{of(0), args.scales, {}, {}, args.count, args.tiles, args.times};
    for (int i = 0; i < kMaxProducts; ++i) {
      if (i > 0) params.others[i - 1] = of(i);
      params.k_tiles[i] = i < args.count ? ceil_div(args.products[i].k, kTileK) : 0;
    }
    return params;
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const& problem, Arguments const& args) {
    for (int i = 0; i < args.count; ++i) {
      auto const own = cute::make_shape(args.rows, int32_t(cute::get<1>(problem)),
                                        args.products[i].k, int32_t(1));
      if (!Base::can_implement(own, args.products[i].operands)) return false;
    }
    return true;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 1; i < params.count; ++i) Base::prefetch_tma_descriptors(params.others[i - 1]);
  }

  template <class ProblemShape_MNKL>
  CUTLASS_DEVICE auto load_init(ProblemShape_MNKL const& problem, Params const& params) const {
    return Base::load_init(problem, params);
  }

  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState stage,
                           cute::tuple<TensorA, TensorB> const& inputs, BlockCoord const& blk_coord,
                           KTileIterator k_tile_iter, int k_tile_count, int thread_idx,
                           uint32_t block_rank_in_cluster, TensorStorage& shared_tensors) {
    using namespace cute;
    ScatterTiles const& tiles = params.tiles;
    int32_t const padded_row = int32_t(get<0>(blk_coord)) * kTileM;
    ScatterTimer<kTimed> const timer(
        params.times, tiles, tiles.owner(padded_row),
        tiles.tile(tiles.row_of(padded_row) / kTileM, int32_t(get<1>(blk_coord))));
    if (kTimed && thread_idx % 32 == 0) timer.loads_begin();
    load_products(params, pipeline, stage, inputs, blk_coord, k_tile_iter, k_tile_count, thread_idx,
                  block_rank_in_cluster, shared_tensors);
    if constexpr (kTimed) {
      __syncwarp();  // one lane of all issues the loads
      if (thread_idx % 32 == 0) timer.loads_end();
    }
  }

  /// What the producers' spare warp does.
  CUTLASS_DEVICE static void spare_work(Params const&) {}

  template <class FrgTensorC>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState stage, FrgTensorC& accumulators,
                          int k_tile_count, int thread_idx, TensorStorage& shared_tensors,
                          Params const& params) {
    if constexpr (kScalesBlocks) {
      ScalesOfBlocks const scales(params.block_scales, shared_tensors.tile_starts,
                                  shared_tensors.scales, thread_idx);
      promoting_mma<Base>(pipeline, stage, accumulators, k_tile_count, thread_idx, shared_tensors,
                          scales);
    } else if constexpr (kAccumulation == Accumulation::Slow) {
      promoting_mma<Base>(pipeline, stage, accumulators, k_tile_count, thread_idx, shared_tensors,
                          NoScales{});
    } else {
      Base::mma(pipeline, stage, accumulators, k_tile_count, thread_idx, shared_tensors, params);
    }
  }

 private:
  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load_products(Params const& params, MainloopPipeline pipeline,
                                    PipelineState stage,
                                    cute::tuple<TensorA, TensorB> const& inputs,
                                    BlockCoord const& blk_coord, KTileIterator k_tile_iter,
                                    int k_tile_count, int thread_idx,
                                    uint32_t block_rank_in_cluster, TensorStorage& shared_tensors) {
    using namespace cute;
    // A tile that only pads its chunk takes rows of the next one, which nobody stores.
    int32_t const row = params.tiles.a_row(int32_t(get<0>(blk_coord)) * kTileM);
    if constexpr (kScalesBlocks) {
      // The consumers find where the tile begins beside its first k tile. The place is written once
      // they have read what the stage had, and before they are told of this tile: by the lane that
      // tells them, which Base::load() elects in the same way, and whose arrival at the stage
      // releases what it wrote.
      if (elect_one_sync()) {
        while (pipeline.producer_try_acquire(stage) != cutlass::BarrierStatus::WaitDone) {
        }
        shared_tensors.tile_starts[stage.index()] = {row, int32_t(get<1>(blk_coord)) * kTileN};
        asm volatile("" ::: "memory");  // CUTLASS's arrival at the stage clobbers nothing
      }
    }
    auto const a = domain_offset(make_coord(row, _0{}, _0{}, _0{}, _0{}), get<0>(inputs));
    auto const coord = make_coord(_0{}, get<1>(blk_coord), get<2>(blk_coord), get<3>(blk_coord));
    if (params.count == 1) {
      Base::load(params, pipeline, stage, make_tuple(a, get<1>(inputs)), coord, k_tile_iter,
                 k_tile_count, thread_idx, block_rank_in_cluster, shared_tensors);
      return;
    }
    // The k tiles of all products before this CTA's split, and what is left of that split.
    int skipped = kSplits ? int(k_tile_iter.coord) : 0;
    int left = k_tile_count;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < params.count; ++i) {
      typename Base::Params const& product =
          i == 0 ? static_cast<typename Base::Params const&>(params) : params.others[i - 1];
      // The coordinates are those of the first product: where a product ends, its descriptor says.
      auto first = k_tile_iter;
      int count = params.k_tiles[i];
      if constexpr (kSplits) {
        int const before = min_of(skipped, count);
        skipped -= before;
        count = min_of(count - before, left);
        left -= count;
        if (count == 0) continue;
        first.coord = before;
      }
      Base::load(product, pipeline, stage, make_tuple(a, get<1>(inputs)), coord, first, count,
                 thread_idx, block_rank_in_cluster, shared_tensors);
      stage.advance(count);
    }
  }
};

}  // namespace agmm
