// CUTLASS's warp-specialised kernels with another start: their parameters, shared memory, barriers
// and the consumers' work are CUTLASS's, for an epilogue that loads nothing and a scheduler whose
// CTAs know their tiles. CUTLASS's warps do one thing after the other before the first load, and a
// signal would be looked at after all of them; here the warps of the producers' group share that.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/gemm.h"
#include "gemm/sm90/chunk_gate.hpp"
#include "sync/device_wait.hpp"
#include "sync/named_barrier.hpp"
#include "testing/stress_delay.hpp"

namespace agmm {

/// Base: a GemmUniversal, cooperative or pingpong, of an AsyncInputMainloop.
///
/// Invariants. Barriers in shared memory are made by one warp (those that order the consumers of
/// pingpong kernels by a consumer), which then arrives at the barriers behind which others use
/// them: kStarted for the consumers, kMayLoad for the warp that loads, the cluster's for all where
/// there is one. The first look at the signals is another warp's: it acquires them, writes down
/// which it has seen, and arrives at kMayLoad, behind which the warp that loads reads that; so what
/// the signals announced is visible to that warp, and to its TMA loads behind its proxy fence.
/// Every warp that reads or writes memory executes wait_for_previous_kernel() before.
template <class Base>
struct QuickStartKernel : Base {
  using typename Base::CollectiveEpilogue;
  using typename Base::CollectiveMainloop;
  using typename Base::Params;
  using typename Base::SharedStorage;
  using typename Base::TileScheduler;
  using ClusterShape = typename Base::ClusterShape;
  using TileShape = typename Base::TileShape;
  using TiledMma = typename Base::TiledMma;
  using MainloopPipeline = typename CollectiveMainloop::MainloopPipeline;
  using PipelineState = typename CollectiveMainloop::PipelineState;
  using LoadPipeline = typename CollectiveEpilogue::LoadPipeline;
  using StorePipeline = typename CollectiveEpilogue::StorePipeline;
  static constexpr bool kHasCluster = cute::size(ClusterShape{}) > 1;
  static constexpr bool kCooperative =
      cute::is_base_of_v<cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                         typename CollectiveMainloop::DispatchPolicy::Schedule>;
  static constexpr int kConsumers = Base::MaxThreadsPerBlock - cutlass::NumThreadsPerWarpGroup;
  static constexpr int kTileConsumers = cute::size(TiledMma{});
  static_assert(!TileScheduler::IsDynamicPersistent);
  static_assert(std::is_void_v<typename CollectiveEpilogue::ElementC>,
                "nobody makes the barriers of an epilogue that loads");
  static_assert(kConsumers == 256 && kTileConsumers == (kCooperative ? 256 : 128));

  CUTLASS_DEVICE void operator()(Params const& params, char* shared_memory) {
    auto& storage = *reinterpret_cast<SharedStorage*>(shared_memory);
    int const warp = cutlass::canonical_warp_idx_sync();
    // The load warp's code, which everything else waits for, is to lie at the kernel's begin: ptxas
    // puts what a condition guards behind what comes without it. No switch (nor four comparisons
    // for equality), which would become a jump by a table in memory that no cache holds yet.
    if (warp >= kFirstConsumerWarp) {
      consume(params, storage, warp);
      return;
    }
    cutlass::arch::warpgroup_reg_dealloc<kLoadRegisters>();
    if (warp != kLoadWarp) {
      if (warp > kLookWarp) {
        help(params, storage);
      } else if (warp == kLookWarp) {
        look(params, storage);
      } else {
        set_up(params, storage);
      }
      return;
    }
    load(params, storage);
  }

 private:
  /// CUTLASS's, but for tiles whose sums leave the consumers so many that the others get more.
  static constexpr bool kSharesRegisters = Base::RegsPerThread <= 144;
  static constexpr int kLoadRegisters = kSharesRegisters ? 56 : Base::LoadRegisterRequirement;
  static constexpr int kConsumerRegisters = kSharesRegisters ? 224 : Base::MmaRegisterRequirement;
  static constexpr int kLoadWarp = 0;
  static constexpr int kSetupWarp = 1;
  static constexpr int kLookWarp = 2;  // the last one helps
  static constexpr int kFirstConsumerWarp = cutlass::NumWarpsPerWarpGroup;
  static constexpr int kMayLoadThreads = 3 * cutlass::NumThreadsPerWarp;
  static constexpr int kStartedThreads = kConsumers + cutlass::NumThreadsPerWarp;

  CUTLASS_DEVICE static typename MainloopPipeline::Params stage_params(Params const& params,
                                                                       int warp) {
    typename MainloopPipeline::Params of_stages;
    of_stages.role = warp < kFirstConsumerWarp ? MainloopPipeline::ThreadCategory::Producer
                                               : MainloopPipeline::ThreadCategory::Consumer;
    of_stages.is_leader = threadIdx.x % cutlass::NumThreadsPerWarpGroup == 0;
    of_stages.num_consumers = kTileConsumers;
    of_stages.num_producers = Base::NumProducerThreads;
    of_stages.transaction_bytes = params.mainloop.tma_transaction_bytes;
    of_stages.initializing_warp = kSetupWarp;
    return of_stages;
  }

  CUTLASS_DEVICE static MainloopPipeline make_stages(Params const& params, SharedStorage& storage,
                                                     int warp) {
    return MainloopPipeline(storage.pipelines.mainloop, stage_params(params, warp), ClusterShape{},
                            cute::false_type{});
  }

  CUTLASS_DEVICE static void meet_cluster() {
    if constexpr (kHasCluster) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    }
  }

  template <class Work>
  CUTLASS_DEVICE static auto coordinates(Work const& work) {
    return cute::make_coord(work.M_idx, work.N_idx, cute::_, work.L_idx);
  }

  CUTLASS_DEVICE static auto problem_of(Params const& params) {
    return cute::append<4>(params.problem_shape, cute::Int<1>{});
  }

  CUTLASS_DEVICE static void set_up(Params const& params, SharedStorage& storage) {
    MainloopPipeline::init_barriers(storage.pipelines.mainloop, stage_params(params, kSetupWarp),
                                    ClusterShape{});
    named_barrier_arrive<NamedBarrier::kMayLoad, kMayLoadThreads>();
    meet_cluster();
    if constexpr (!kHasCluster) named_barrier_arrive<NamedBarrier::kStarted, kStartedThreads>();
  }

  CUTLASS_DEVICE static void look(Params const& params, SharedStorage& storage) {
    if constexpr (kHasCluster) cute::cluster_arrive_relaxed();
    wait_for_previous_kernel();
    uint32_t const seen = first_look(params.mainloop.input.arrival);
    if (cute::elect_one_sync()) storage.tensors.mainloop.seen = seen;
    __syncwarp();
    stress_delay_warp(params.mainloop.input.arrival.wait_limit.rank);
    named_barrier_arrive<NamedBarrier::kMayLoad, kMayLoadThreads>();
    if constexpr (kHasCluster) cute::cluster_wait();
  }

  CUTLASS_DEVICE static void help(Params const& params, SharedStorage& storage) {
    meet_cluster();
    wait_for_previous_kernel();
    TileScheduler scheduler{params.scheduler};
    if (scheduler.initial_work_tile_info(ClusterShape{}).is_valid()) {
      CollectiveMainloop{}.load_auxiliary(params.mainloop, storage.tensors.mainloop);
    }
  }

  CUTLASS_DEVICE static void load(Params const& params, SharedStorage& storage) {
    if (cute::elect_one_sync()) CollectiveMainloop::prefetch_tma_descriptors(params.mainloop);
    if constexpr (kHasCluster) cute::cluster_arrive_relaxed();
    TileScheduler scheduler{params.scheduler};
    auto work = scheduler.initial_work_tile_info(ClusterShape{});
    CollectiveMainloop mainloop;
    auto const load_inputs = mainloop.load_init(problem_of(params), params.mainloop);
    MainloopPipeline stages = make_stages(params, storage, kLoadWarp);
    PipelineState state = cutlass::make_producer_start_state<MainloopPipeline>();
    bool may_load = false;
    // Called by load() when it knows what to load.
    auto const await_start = [&] {
      if (may_load) return;
      named_barrier_sync<NamedBarrier::kMayLoad, kMayLoadThreads>();
      stress_delay_warp(params.mainloop.input.arrival.wait_limit.rank);
      fence_proxy_async_global();
      if constexpr (kHasCluster) cute::cluster_wait();
      may_load = true;
    };
    while (work.is_valid()) {
      int const k_tiles =
          TileScheduler::get_work_k_tile_count(work, problem_of(params), TileShape{});
      mainloop.load(params.mainloop, stages, state, load_inputs, coordinates(work),
                    TileScheduler::get_work_k_tile_start(work), k_tiles, await_start,
                    cute::block_rank_in_cluster(), storage.tensors.mainloop);
      state.advance(k_tiles);
      scheduler.advance_to_next_work();
      work = scheduler.get_current_work();
    }
    await_start();  // where there is no tile
    mainloop.load_tail(stages, state);
  }

  CUTLASS_DEVICE static void consume(Params const& params, SharedStorage& storage, int warp) {
    using namespace cute;
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    if (warp == kFirstConsumerWarp) {
      if (elect_one_sync()) {
        CollectiveEpilogue::prefetch_tma_descriptors(params.epilogue);
        if constexpr (!kCooperative) {
          for (auto& depth : storage.pipelines.math_wg_order.barrier_) {
            for (auto& barrier : depth) barrier.init(cutlass::NumThreadsPerWarpGroup);
          }
        }
      }
      if constexpr (!kCooperative) cutlass::arch::fence_barrier_init();
    }
    meet_cluster();
    if constexpr (!kHasCluster) named_barrier_sync<NamedBarrier::kStarted, kStartedThreads>();
    wait_for_previous_kernel();

    auto const problem = problem_of(params);
    TileScheduler scheduler{params.scheduler};
    CollectiveMainloop mainloop;
    MainloopPipeline stages = make_stages(params, storage, warp);
    CollectiveEpilogue epilogue(params.epilogue, storage.tensors.epilogue);
    LoadPipeline loads(storage.pipelines.epi_load, typename LoadPipeline::Params{}, false_type{});
    typename StorePipeline::Params of_stores;
    of_stores.always_wait = true;
    StorePipeline stores(of_stores);
    typename CollectiveEpilogue::LoadPipelineState load_state;
    auto store_state = cutlass::make_producer_start_state<StorePipeline>();
    PipelineState state;
    TiledMma tiled_mma;
    int const thread = threadIdx.x % kTileConsumers;
    int const warpgroup = cutlass::canonical_warp_group_idx() - 1;
    if constexpr (kCooperative) {
      auto work = scheduler.initial_work_tile_info(ClusterShape{});
      bool has_stored = false;
      while (work.is_valid()) {
        int const k_tiles = TileScheduler::get_work_k_tile_count(work, problem, TileShape{});
        auto sums = partition_fragment_C(tiled_mma, take<0, 2>(TileShape{}));
        mainloop.mma(stages, state, sums, k_tiles, thread, storage.tensors.mainloop,
                     params.mainloop);
        mainloop.mma_tail(stages, state, k_tiles);
        state.advance(k_tiles);
        TileScheduler::fixup(params.scheduler, work, sums, Base::NumMmaWarpGroups, warpgroup);
        if (TileScheduler::compute_epilogue(work, params.scheduler)) {
          auto [next_load, next_store] = epilogue.store(
              loads, load_state, stores, store_state, problem, TileShape{}, coordinates(work), sums,
              tiled_mma, thread, storage.tensors.epilogue, work.reduction_subtile_idx());
          load_state = next_load;
          store_state = next_store;
          has_stored = true;
        }
        scheduler.advance_to_next_work();
        work = scheduler.get_current_work();
      }
      if (has_stored) epilogue.store_tail(loads, load_state, stores, store_state);
    } else {
      using Order = typename Base::MathWarpGroupOrderBarrier;
      constexpr int kLoadsOfTile = CollectiveEpilogue::get_load_pipe_increment(TileShape{});
      constexpr int kStoresOfTile = CollectiveEpilogue::get_store_pipe_increment(TileShape{});
      Order order(storage.pipelines.math_wg_order,
                  {uint32_t(warpgroup), cutlass::NumThreadsPerWarpGroup});
      int const k_tiles = params.mainloop.input.k_tiles;
      if (warpgroup == 1) {
        scheduler.advance_to_next_work();
        state.advance(k_tiles);
        load_state.advance(kLoadsOfTile);
        store_state.advance(kStoresOfTile);
      }
      auto work = scheduler.initial_work_tile_info(ClusterShape{});
      while (work.is_valid()) {
        auto sums = partition_fragment_C(tiled_mma, take<0, 2>(TileShape{}));
        order.wait();
        mainloop.mma(stages, state, sums, k_tiles, thread, storage.tensors.mainloop,
                     params.mainloop);
        order.arrive();
        mainloop.mma_tail(stages, state, k_tiles);
        state.advance(k_tiles * Base::NumMmaWarpGroups);
        order.wait();
        auto [stored_load, stored_store] =
            epilogue.store(loads, load_state, stores, store_state, problem, TileShape{},
                           coordinates(work), sums, tiled_mma, thread, storage.tensors.epilogue);
        // The tail comes before the other warpgroup writes to the buffers.
        auto [next_load, next_store] =
            epilogue.store_tail(loads, stored_load, stores, stored_store);
        load_state = next_load;
        store_state = next_store;
        load_state.advance(kLoadsOfTile);
        store_state.advance(kStoresOfTile);
        order.arrive();
        scheduler.advance_to_next_work(Base::NumMmaWarpGroups);
        work = scheduler.get_current_work();
      }
    }
  }
};

}  // namespace agmm
