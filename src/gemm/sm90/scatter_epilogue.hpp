// The epilogue of matmul + reduce-scatter: CUTLASS's for the tiles of this rank's chunk, once the
// others' sums are added; the other tiles go to their owners. The warp that loads C in other
// kernels sends. Of matmul + all-reduce too, whose own tiles go to all.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "gemm/sm90/epilogue_fragment.hpp"
#include "gemm/sm90/residual_tile.hpp"
#include "gemm/sm90/tile_timer.hpp"
#include "gemm/split_k.hpp"
#include "transport/tile_push_device.hpp"
#include "transport/tile_push_return_device.hpp"

namespace agmm {

/// `Base`: CUTLASS's TMA epilogue without C. `kGroups`: groups of consumers that compute tiles in
/// turn, 2 in pingpong kernels. kSplits: several CTAs may compute a tile, each a split of K.
/// kTimed: records ScatterTimes. `Policy`: what becomes of sums; those that it scales are scaled
/// first. kReturns: own tiles are sent to all others as well (TileReturn); then they are finished
/// here, for those too, and CUTLASS's epilogue only rounds them. A residual is added to own tiles
/// where the policy scales no sums.
template <class Base, class Policy, int kTileThreads, int kGroups, int kPieces, int kBuffers,
          int kClusterSize, bool kSplits, bool kTimed, bool kReturns = false>
struct ScatterEpilogue : Base {
  using Element = typename Policy::Out;
  using CtaTile = typename Base::CtaTileMNK;
  static constexpr int kTileM = cute::size<0>(CtaTile{});
  static constexpr int kTileN = cute::size<1>(CtaTile{});
  static constexpr int kFloats = kTileM * kTileN / kTileThreads;
  using Push =
      cute::conditional_t<kReturns,
                          TileReturn<Element, kTileM, kTileN, kTileThreads, kPieces, kBuffers>,
                          TilePush<Element, kTileThreads, kFloats, kPieces, kBuffers>>;
  /// Whether the sender brings the others' sums: no other consumers compute while they are added.
  static constexpr bool kFetches = kGroups == 1 && !kReturns;
  /// Words of the residual that a thread loads at a time. Where consumers take turns, they have no
  /// more registers, timed ones and those of wide tiles even less, and the others compute
  /// meanwhile.
  static constexpr int kResidualWords = kGroups == 1 ? 32 : kTimed || kFloats > 128 ? 4 : 8;
  static_assert(!kSplits || kFetches, "the sender is told of all tiles of which K is split");

  /// The scales of the tile that is scaled; groups take turns.
  using HeldScales = typename FragmentEpilogue<Policy>::template Held<kTileN>;
  struct TensorStorage : Base::TensorStorage, HeldScales {
    typename Push::Storage push;
  };
  struct SharedStorage {
    TensorStorage tensors;
    typename Base::PipelineStorage pipeline;
  };

  struct Arguments : Base::Arguments {
    TilePushArgs push{};
    SplitK split_k{};
    ScatterTimes* times = nullptr;
    FragmentEpilogue<Policy> fragment{};
    Element const* residual = nullptr;  // as out, or null
  };
  struct Params : Base::Params {
    TilePushArgs push;
    SplitK split_k;
    ScatterTimes* times;
    FragmentEpilogue<Policy> fragment;
    Element const* residual;
  };

  template <class ProblemShape>
  CUTLASS_HOST_DEVICE static auto own_problem(ProblemShape const& problem,
                                              TilePushArgs const& push) {
    return cute::make_shape(push.tiles.rows, int32_t(cute::get<1>(problem)),
                            int32_t(cute::get<2>(problem)), int32_t(1));
  }

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args,
                                        void* workspace) {
    return {Base::to_underlying_arguments(own_problem(problem, args.push), args, workspace),
            args.push,
            args.split_k,
            args.times,
            args.fragment,
            args.residual};
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const& problem, Arguments const& args) {
    return Base::can_implement(own_problem(problem, args.push), args);
  }

  CUTLASS_DEVICE ScatterEpilogue(Params const& params, TensorStorage& shared)
      : Base(params, shared), params_(&params), push_(&shared.push) {}

  /// The sender's share of a tile, that of `step` in the launch's order. For all lanes of its warp.
  template <class TileCoord>
  CUTLASS_DEVICE void send(TileCoord const& coord, int32_t step, TensorStorage& shared) {
    TilePushArgs const& push = params_->push;
    ScatterTiles const& tiles = push.tiles;
    int32_t const row = int32_t(cute::get<0>(coord)) * kTileM;
    int32_t const owner = tiles.owner(row);
    if (!kFetches && !kReturns && owner == tiles.rank) {
      // Who waits for more to do has signalled all that others may wait for.
      if (lane_id() == 0) Push::finish(push, on_its_way_);
      return;
    }
    int32_t const tile = tiles.tile(tiles.row_of(row) / kTileM, int32_t(cute::get<1>(coord)));
    if constexpr (kFetches) {
      if (owner == tiles.rank) {
        if (is_split() && !Push::is_told_whole()) return;
        if (tile < 0) return;
        Push::prefetch(push, tile);
        if (lane_id() == 0) {
          // Who waits for others has signalled all that they may wait for.
          Push::finish(push, on_its_way_);
          Push::fetch(push, shared.push, own_, tile);
        }
        ++own_;
        __syncwarp();
        return;
      }
    }
    if (number_ == 0) clock_.begin();
    if (is_split()) {
      // All tiles make one wave, so this is the CTA's only tile.
      if (Push::takes_credits(step)) Push::take_credits(push);
      if (!Push::is_told_whole()) return;
      if (tile >= 0 && !Push::takes_credits(step)) Push::await_go(push);
    } else if (tile >= 0 && sent_ == 0) {
      // A tile that only pads awaits no credits: nobody counts who sends nothing, and `go` may have
      // been reset when it looks.
      Push::await_credits(push, step);
    }
    if (lane_id() == 0) {
      Push::send(push, shared.push, number_, owner, tile, clock_, on_its_way_);
      ScatterTimer<kTimed>(params_->times, tiles, owner, tile).done();
    }
    sent_ += tile >= 0 ? 1 : 0;
    __syncwarp();
    ++number_;
  }

  /// Comes behind the sender's last tile.
  CUTLASS_DEVICE void send_tail() {
    if (lane_id() != 0) return;
    Push::finish(params_->push, on_its_way_);
    if constexpr (kFetches) Push::await_fetched(params_->push, *push_, own_);
    Push::count_done(params_->push, sent_ + own_);
  }

  template <class ProblemShape, class TileShape, class TileCoord, class Engine, class Layout,
            class TiledMma>
  CUTLASS_DEVICE auto store(typename Base::LoadPipeline load_pipeline,
                            typename Base::LoadPipelineState load_state,
                            typename Base::StorePipeline store_pipeline,
                            typename Base::StorePipelineState store_state,
                            ProblemShape const& problem, TileShape tile_shape,
                            TileCoord const& coord, cute::Tensor<Engine, Layout> accumulators,
                            TiledMma tiled_mma, int thread, TensorStorage& shared, int32_t step) {
    static_assert(cute::size(Layout{}) == kFloats);
    static_assert(cute::size(TiledMma{}) == kTileThreads);
    TilePushArgs const& push = params_->push;
    ScatterTiles const& tiles = push.tiles;
    int32_t const row = int32_t(cute::get<0>(coord)) * kTileM;
    int32_t const owner = tiles.owner(row);
    int32_t const tile_m = tiles.row_of(row) / kTileM;
    int32_t const tile = tiles.tile(tile_m, int32_t(cute::get<1>(coord)));
    ScatterTimer<kTimed> const timer(params_->times, tiles, owner, tile);
    if (kTimed && thread == 0) timer.computed();
    if (is_split()) {
      int const cluster = step / params_->split_k.splits;
      int const split = step - cluster * params_->split_k.splits;
      auto& sum = *reinterpret_cast<float (*)[kFloats]>(accumulators.data());
      bool const is_whole = add_splits<kClusterSize>(params_->split_k, cluster, split, sum);
      Push::tell_sender(is_whole);
      if (!is_whole) return cute::make_tuple(load_state, store_state);
    }
    if constexpr (Policy::kScaled) {
      params_->fragment.template scale<kTileThreads, cute::size<1>(Layout{}),
                                       cute::size<2>(Layout{}), cute::size<0>(Layout{})>(
          accumulators.data(), static_cast<HeldScales&>(shared), tiles.a_row(row),
          int32_t(cute::get<1>(coord)) * kTileN, thread);
    }
    // Every group computes each kGroups-th tile of the CTA, the first one the first.
    int const group = kGroups == 1 ? 0 : int(threadIdx.x) / kTileThreads - 1;
    if (owner != tiles.rank) {
      Push::put(shared.push, accumulators.data(), number_ * kGroups + group, thread, tiles.rank);
      ++number_;
      return cute::make_tuple(load_state, store_state);
    }
    if (tile >= 0 && has_residual()) {
      residual(problem, tile_m, coord)
          .template prefetch<kTileThreads, kTileM, kTileN>(thread_again());
    }
    if (tile >= 0) {
      if constexpr (kFetches) {
        Push::add_fetched(push, shared.push, accumulators.data(), own_++, thread);
      } else {
        // There are no registers for it beside scales.
        constexpr bool kLoadsAhead = !Policy::kScaled && !kReturns;
        Push::template add_parts<kLoadsAhead>(push, accumulators.data(), tile, thread);
      }
    }
    if (tile >= 0 && has_residual()) {
      static_assert(Policy::Math::kKeepsSums, "a residual is added to the sum");
      residual(problem, tile_m, coord)
          .template add<kResidualWords, kTileThreads, cute::size<1>(Layout{}),
                        cute::size<2>(Layout{}), cute::size<0>(Layout{})>(accumulators.data(),
                                                                          thread_again());
    }
    if constexpr (kReturns) {
      params_->fragment.template finish<cute::size<1>(Layout{}), cute::size<2>(Layout{}),
                                        cute::size<0>(Layout{})>(
          accumulators.data(), int32_t(cute::get<1>(coord)) * kTileN, thread);
      Push::put_result(shared.push, accumulators.data(), number_ * kGroups + group, thread,
                       tiles.rank);
      ++number_;
    }
    if (kTimed && thread == 0) timer.done();
    return Base::store(
        load_pipeline, load_state, store_pipeline, store_state, own_problem(problem, push),
        tile_shape,
        cute::make_coord(tile_m, cute::get<1>(coord), cute::get<2>(coord), cute::get<3>(coord)),
        accumulators, tiled_mma, thread, shared);
  }

 private:
  CUTLASS_DEVICE bool is_split() const {
    if constexpr (kSplits) return params_->split_k.splits != 1;
    return false;
  }

  // Neither these nor a thread's number have a register of their own while the others' sums are
  // loaded, so they are found again behind that.
  CUTLASS_DEVICE bool has_residual() const {
    return !Policy::kScaled && params_->residual != nullptr;
  }
  template <class ProblemShape, class TileCoord>
  CUTLASS_DEVICE ResidualTile<Element> residual(ProblemShape const& problem, int32_t tile_m,
                                                TileCoord const& coord) const {
    return {params_->residual, params_->push.tiles.rows, int32_t(cute::get<1>(problem)),
            tile_m * kTileM, int32_t(cute::get<1>(coord)) * kTileN};
  }
  CUTLASS_DEVICE static int thread_again() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return (thread - cutlass::NumThreadsPerWarpGroup) % kTileThreads;
  }

  Params const* params_;
  typename Push::Storage* push_;
  MeasuredClock clock_;      // of a sender
  int number_ = 0;           // tiles to be sent so far, of this group or sender
  int sent_ = 0;             // by this sender, without those that only pad
  int own_ = 0;              // own tiles so far that were fetched for, or of the others' sums
  TileOnItsWay on_its_way_;  // of a sender
};

}  // namespace agmm
