// CUTLASS's warp-specialised kernels for tiles that are claimed while the kernel runs
// (claimed_steps.hpp): their parameters, pipelines, mainloop and epilogue are CUTLASS's; which warp
// does what is written out here.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/gemm.h"
#include "gemm/sm90/claimed_steps.hpp"

namespace agmm {

/// Base: a GemmUniversal, cooperative or pingpong, of a ScatterMainloop and a ScatterEpilogue.
///
/// Of the producers' warps one loads, one makes the claims of its cluster, one sends; the fourth
/// makes the barriers, and then does what the mainloop has for a spare warp. The first claim is on
/// its way to memory while barriers are made.
template <class Base>
struct ClaimingKernel : Base {
  using typename Base::CollectiveEpilogue;
  using typename Base::CollectiveMainloop;
  using typename Base::Params;
  using typename Base::TileScheduler;
  using ClusterShape = typename Base::ClusterShape;
  using TileShape = typename Base::TileShape;
  using TiledMma = typename Base::TiledMma;
  using MainloopPipeline = typename CollectiveMainloop::MainloopPipeline;
  using PipelineState = typename CollectiveMainloop::PipelineState;
  using LoadPipeline = typename CollectiveEpilogue::LoadPipeline;
  using StorePipeline = typename CollectiveEpilogue::StorePipeline;
  using Push = typename CollectiveEpilogue::Push;
  static constexpr int kClusterSize = cute::size(ClusterShape{});
  static constexpr int kConsumers = Base::MaxThreadsPerBlock - cutlass::NumThreadsPerWarpGroup;
  static constexpr int kTileConsumers = cute::size(TiledMma{});
  static constexpr int kGroups = kConsumers / kTileConsumers;  // that compute tiles in turn
  static_assert(!TileScheduler::IsDynamicPersistent);
  static_assert(std::is_void_v<typename CollectiveEpilogue::ElementC>,
                "nobody makes the barriers of an epilogue that loads");
  static_assert(kGroups == 1 || kGroups == 2);
  using Claimed = ClaimedSteps<kClusterSize>;

  struct SharedStorage : Base::SharedStorage {
    typename Claimed::Storage claimed;
  };
  static constexpr int SharedStorageSize = sizeof(SharedStorage);

  CUTLASS_DEVICE void operator()(Params const& params, char* shared_memory) {
    auto& storage = *reinterpret_cast<SharedStorage*>(shared_memory);
    int const warp = cutlass::canonical_warp_idx_sync();
    ClaimList claims = list_of(params);
    if (warp == kClaimWarp) {
      if (Claimed::makes_claims() && lane_id() == 0) claims.begin();
    } else if (warp == kSpareWarp) {
      set_up(params, storage);
    } else if (warp == kLoadWarp) {
      if (cute::elect_one_sync()) {
        CollectiveMainloop::prefetch_tma_descriptors(params.mainloop);
        CollectiveEpilogue::prefetch_tma_descriptors(params.epilogue);
      }
    }
    if constexpr (kClusterSize > 1) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }
    if (warp >= kFirstConsumerWarp) {
      cutlass::arch::warpgroup_reg_alloc<Base::MmaRegisterRequirement>();
      if constexpr (kGroups == 1) {
        consume(params, storage, warp);
      } else {
        consume_in_turn(params, storage, warp);
      }
      return;
    }
    cutlass::arch::warpgroup_reg_dealloc<Base::LoadRegisterRequirement>();
    if (warp == kLoadWarp) {
      load(params, storage);
    } else if (warp == kClaimWarp) {
      if (Claimed::makes_claims()) make_claims(storage, claims);
    } else if (warp == kSendWarp) {
      send(params, storage);
    } else {
      CollectiveMainloop::spare_work(params.mainloop);
    }
  }

 private:
  static constexpr int kLoadWarp = 0;
  static constexpr int kClaimWarp = 1;
  static constexpr int kSendWarp = 2;
  static constexpr int kSpareWarp = 3;
  static constexpr int kFirstConsumerWarp = cutlass::NumWarpsPerWarpGroup;
  static constexpr uint32_t kTakers =
      2 + kTileConsumers / cutlass::NumThreadsPerWarp;  // who loads, who sends, one group

  CUTLASS_DEVICE static typename MainloopPipeline::Params stage_params(Params const& params,
                                                                       int warp) {
    typename MainloopPipeline::Params of_stages;
    of_stages.role = warp < kFirstConsumerWarp ? MainloopPipeline::ThreadCategory::Producer
                                               : MainloopPipeline::ThreadCategory::Consumer;
    of_stages.is_leader = threadIdx.x % cutlass::NumThreadsPerWarpGroup == 0;
    of_stages.num_consumers = kTileConsumers;
    of_stages.num_producers = Base::NumProducerThreads;
    of_stages.transaction_bytes = params.mainloop.tma_transaction_bytes;
    of_stages.initializing_warp = kSpareWarp;
    return of_stages;
  }

  CUTLASS_DEVICE static MainloopPipeline make_stages(Params const& params, SharedStorage& storage,
                                                     int warp) {
    return MainloopPipeline(storage.pipelines.mainloop, stage_params(params, warp), ClusterShape{},
                            cute::false_type{});
  }

  CUTLASS_DEVICE static void set_up(Params const& params, SharedStorage& storage) {
    MainloopPipeline::init_barriers(storage.pipelines.mainloop, stage_params(params, kSpareWarp),
                                    ClusterShape{});
    if (cute::elect_one_sync()) {
      Push::init(storage.tensors.epilogue.push);
      Claimed::init(storage.claimed, kTakers);
      if constexpr (kGroups == 2) {
        for (auto& depth : storage.pipelines.math_wg_order.barrier_) {
          for (auto& barrier : depth) barrier.init(cutlass::NumThreadsPerWarpGroup);
        }
      }
    }
    cutlass::arch::fence_barrier_init();
  }

  /// The grid is (ClusterM, rest, 1).
  CUTLASS_DEVICE static ClaimList list_of(Params const& params) {
    constexpr int kClusterN = cute::size<1>(ClusterShape{});
    return {params.epilogue.push.claims,
            int32_t(params.scheduler.blocks_per_problem_) / kClusterSize,
            int32_t(gridDim.y) / kClusterN, int32_t(blockIdx.y) / kClusterN};
  }

  CUTLASS_DEVICE static void make_claims(SharedStorage& storage, ClaimList& claims) {
    int32_t const first = claims.first();
    if (lane_id() == 0) Claimed::put(storage.claimed, {}, first);
    Claimed::template make_claims<kGroups>(storage.claimed, claims);
  }

  template <class Work>
  CUTLASS_DEVICE static auto coordinates(Work const& work) {
    return cute::make_coord(work.M_idx, work.N_idx, cute::_, work.L_idx);
  }

  CUTLASS_DEVICE static auto problem_of(Params const& params) {
    return cute::append<4>(params.problem_shape, cute::Int<1>{});
  }

  CUTLASS_DEVICE static void load(Params const& params, SharedStorage& storage) {
    using namespace cute;
    TileScheduler const scheduler{params.scheduler};
    CollectiveMainloop mainloop;
    auto const inputs = mainloop.load_init(problem_of(params), params.mainloop);
    auto const k_shape = shape<3>(get<0>(inputs));
    MainloopPipeline stages = make_stages(params, storage, kLoadWarp);
    PipelineState state = cutlass::make_producer_start_state<MainloopPipeline>();
    ClaimNumber at;
    CUTLASS_PRAGMA_NO_UNROLL
    for (;; ++at.number) {
      int32_t const step = Claimed::take(storage.claimed, at);
      if (step == ClaimList::kNone) break;
      if (lane_id() == 0) Claimed::begin(storage.claimed);
      auto const work = scheduler.work_at(step);
      int const k_tiles =
          TileScheduler::get_work_k_tile_count(work, problem_of(params), TileShape{});
      auto const first_k_tile = make_coord_iterator(
          idx2crd(TileScheduler::get_work_k_tile_start(work), k_shape), k_shape);
      mainloop.load(params.mainloop, stages, state, inputs, coordinates(work), first_k_tile,
                    k_tiles, lane_id(), block_rank_in_cluster(), storage.tensors.mainloop);
      state.advance(k_tiles);
    }
    take_last(storage, at);
    mainloop.load_tail(stages, state);
  }

  CUTLASS_DEVICE static void send(Params const& params, SharedStorage& storage) {
    TileScheduler const scheduler{params.scheduler};
    CollectiveEpilogue epilogue(params.epilogue, storage.tensors.epilogue);
    ClaimNumber at;
    CUTLASS_PRAGMA_NO_UNROLL
    for (;; ++at.number) {
      int32_t const step = Claimed::take(storage.claimed, at);
      if (step == ClaimList::kNone) break;
      epilogue.send(coordinates(scheduler.work_at(step)), step, storage.tensors.epilogue);
    }
    take_last(storage, at);
    epilogue.send_tail();
  }

  /// Where groups take claims in turn, each is told that none is left, and who takes all of them
  /// hears it as often.
  CUTLASS_DEVICE static void take_last(SharedStorage& storage, ClaimNumber at) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < kGroups; ++i) {
      ++at.number;
      Claimed::take(storage.claimed, at);
    }
  }

  CUTLASS_DEVICE static LoadPipeline make_loads(SharedStorage& storage) {
    return LoadPipeline(storage.pipelines.epi_load, typename LoadPipeline::Params{},
                        cute::false_type{});
  }
  CUTLASS_DEVICE static StorePipeline make_stores() {
    typename StorePipeline::Params of_stores;
    of_stores.always_wait = true;
    return StorePipeline(of_stores);
  }

  CUTLASS_DEVICE static void consume(Params const& params, SharedStorage& storage, int warp) {
    using namespace cute;
    TileScheduler const scheduler{params.scheduler};
    CollectiveMainloop mainloop;
    MainloopPipeline stages = make_stages(params, storage, warp);
    CollectiveEpilogue epilogue(params.epilogue, storage.tensors.epilogue);
    LoadPipeline loads = make_loads(storage);
    StorePipeline stores = make_stores();
    typename CollectiveEpilogue::LoadPipelineState load_state;
    auto store_state = cutlass::make_producer_start_state<StorePipeline>();
    PipelineState state;
    TiledMma tiled_mma;
    int const thread = int(threadIdx.x) - cutlass::NumThreadsPerWarpGroup;
    ClaimNumber at;
    int32_t step = Claimed::take(storage.claimed, at);
    CUTLASS_PRAGMA_NO_UNROLL
    while (step != ClaimList::kNone) {
      auto const work = scheduler.work_at(step);
      int const k_tiles =
          TileScheduler::get_work_k_tile_count(work, problem_of(params), TileShape{});
      auto sums = partition_fragment_C(tiled_mma, take<0, 2>(TileShape{}));
      mainloop.mma(stages, state, sums, k_tiles, thread, storage.tensors.mainloop, params.mainloop);
      mainloop.mma_tail(stages, state, k_tiles);
      state.advance(k_tiles);
      // The next step was claimed when the loads of this tile began.
      ++at.number;
      int32_t const next = Claimed::take(storage.claimed, at);
      auto [next_load, next_store] = epilogue.store(
          loads, load_state, stores, store_state, problem_of(params), TileShape{},
          coordinates(work), sums, tiled_mma, thread, storage.tensors.epilogue, step);
      load_state = next_load;
      store_state = next_store;
      step = next;
    }
    if (at.number > 0) epilogue.store_tail(loads, load_state, stores, store_state);
  }

  /// Two groups take turns: one multiplies while the other stores or sends.
  CUTLASS_DEVICE static void consume_in_turn(Params const& params, SharedStorage& storage,
                                             int warp) {
    using namespace cute;
    using Order = typename Base::MathWarpGroupOrderBarrier;
    constexpr int kLoadsOfTile = CollectiveEpilogue::get_load_pipe_increment(TileShape{});
    constexpr int kStoresOfTile = CollectiveEpilogue::get_store_pipe_increment(TileShape{});
    TileScheduler const scheduler{params.scheduler};
    CollectiveMainloop mainloop;
    MainloopPipeline stages = make_stages(params, storage, warp);
    CollectiveEpilogue epilogue(params.epilogue, storage.tensors.epilogue);
    LoadPipeline loads = make_loads(storage);
    StorePipeline stores = make_stores();
    typename CollectiveEpilogue::LoadPipelineState load_state;
    auto store_state = cutlass::make_producer_start_state<StorePipeline>();
    PipelineState state;
    TiledMma tiled_mma;
    int const thread = int(threadIdx.x) % kTileConsumers;
    int const group = cutlass::canonical_warp_group_idx() - 1;
    Order order(storage.pipelines.math_wg_order,
                {uint32_t(group), cutlass::NumThreadsPerWarpGroup});
    int const k_tiles = int(get<2>(params.problem_shape)) / int(get<2>(TileShape{}));
    ClaimNumber at{uint32_t(group)};
    int32_t step = Claimed::take(storage.claimed, at);
    if (group == 1) {
      state.advance(k_tiles);
      load_state.advance(kLoadsOfTile);
      store_state.advance(kStoresOfTile);
    }
    CUTLASS_PRAGMA_NO_UNROLL
    while (step != ClaimList::kNone) {
      auto const work = scheduler.work_at(step);
      auto sums = partition_fragment_C(tiled_mma, take<0, 2>(TileShape{}));
      order.wait();
      mainloop.mma(stages, state, sums, k_tiles, thread, storage.tensors.mainloop, params.mainloop);
      order.arrive();
      mainloop.mma_tail(stages, state, k_tiles);
      state.advance(k_tiles * kGroups);
      order.wait();
      auto [stored_load, stored_store] = epilogue.store(
          loads, load_state, stores, store_state, problem_of(params), TileShape{},
          coordinates(work), sums, tiled_mma, thread, storage.tensors.epilogue, step);
      // The tail comes before the other group writes to the buffers.
      auto [next_load, next_store] = epilogue.store_tail(loads, stored_load, stores, stored_store);
      load_state = next_load;
      store_state = next_store;
      load_state.advance(kLoadsOfTile);
      store_state.advance(kStoresOfTile);
      order.arrive();
      at.number += kGroups;
      step = Claimed::take(storage.claimed, at);
    }
  }
};

}  // namespace agmm
