// A TMA warp-specialised mainloop whose A arrives while the kernel runs: CUTLASS's sm90 collective
// with another producer. Per tile the producer thread issues B's loads, acquires the signals of the
// chunks that the tile touches, and only then issues A's. Where the gathered A is wanted, the tiles
// of the first column also store what they loaded. The consumer side is inherited unchanged.
#pragma once

#include <cstdint>

#include "agmm/chunking.hpp"
#include "agmm/device_wait.hpp"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"

namespace agmm {

/// Tells the peers that the gathered A has been read; done by the last CTA to finish its loads.
///
/// Invariant: a peer overwrites a buffer only after its credit; the credit comes after the reset of
/// the signals (release, system scope), which comes after every CTA's last load of A has landed in
/// shared memory (the counter, acquire-release, device scope). So no load is overtaken by a write,
/// and no signal of the next call is lost to this call's reset.
struct Release {
  uint32_t* signals = nullptr;  // reset to 0; null: nothing is released
  int32_t signal_count = 0;
  uint32_t* finished_ctas = nullptr;        // counts up to the grid, then 0 again
  uint32_t* const* peer_credits = nullptr;  // one word in each peer's memory, set to 1; may be null
  int32_t peer_count = 0;
};

struct AsyncInput {
  ChunkGrid chunks{};
  uint32_t const* signals = nullptr;  // null: all of A is ready
  uint32_t ready_value = 1;
  WaitLimit wait_limit{};
  Range local_rows{};  // these rows are read from A_local and need no signal
  Release release{};
  TileTimes* tile_times = nullptr;  // null: not recorded
  int32_t tiles_n = 0;
};

/// kTimed: records TileTimes; a variant of its own, because the producer warp has no register to
/// spare.
template <class Base, bool kTimed = false>
struct AsyncInputMainloop : Base {
  using typename Base::ElementA;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using typename Base::TileShape;
  using ClusterShape = typename Base::DispatchPolicy::ClusterShape;
  using TMA_A = typename Base::Params::TMA_A;

  /// Whether A can be stored: a stage is refilled with A by this CTA alone, whose producer knows
  /// when the store has read it.
  static constexpr bool kCanStoreA = cute::size<1>(ClusterShape{}) == 1;

  struct Arguments : Base::Arguments {
    ElementA const* ptr_A_local = nullptr;  // [local rows, K], rows local_rows.begin ... of A
    ElementA* ptr_A_out = nullptr;          // [M, K] with A's strides: all of A is written; or null
    AsyncInput input{};
  };

  static auto make_tma_store_a(ElementA* ptr, int32_t m, int32_t k, int32_t l,
                               typename Base::StrideA const& stride) {
    using namespace cute;
    return make_tma_copy(SM90_TMA_STORE{},
                         make_tensor(make_gmem_ptr(ptr), make_layout(make_shape(m, k, l), stride)),
                         typename Base::SmemLayoutA{}(_, _, Int<0>{}),
                         make_shape(shape<0>(TileShape{}), shape<2>(TileShape{})), _1{});
  }
  using TMA_A_Store = decltype(make_tma_store_a(nullptr, 0, 0, 0, typename Base::StrideA{}));

  struct Params : Base::Params {
    TMA_A tma_load_a_local;
    TMA_A_Store tma_store_a;
    bool stores_a = false;
    AsyncInput input;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args,
                                        void* workspace) {
    auto const base = Base::to_underlying_arguments(problem, args, workspace);
    // Without a tensor to store to, A stands in for it: the descriptor has to be a legal one.
    bool const stores_a = args.ptr_A_out != nullptr;
    auto const [m, n, k, l] = cute::append<4>(problem, 1);
    auto const store = make_tma_store_a(
        stores_a ? args.ptr_A_out : const_cast<ElementA*>(args.ptr_A), m, k, l, args.dA);
    auto local = base.tma_load_a;
    if (!args.input.local_rows.empty()) {
      auto local_problem = problem;
      cute::get<0>(local_problem) = args.input.local_rows.size();
      typename Base::Arguments local_args = args;
      local_args.ptr_A = args.ptr_A_local;
      local = Base::to_underlying_arguments(local_problem, local_args, workspace).tma_load_a;
    }
    return {base, local, store, stores_a, args.input};
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    cute::prefetch_tma_descriptor(params.tma_load_a_local.get_tma_descriptor());
  }

  template <class ProblemShape_MNKL>
  CUTLASS_DEVICE auto load_init(ProblemShape_MNKL const& problem, Params const& params) {
    params_ = &params;
    return Base::load_init(problem, params);
  }

  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline,
                           PipelineState smem_pipe_write,
                           cute::tuple<TensorA, TensorB> const& load_inputs,
                           BlockCoord const& blk_coord, KTileIterator k_tile_iter, int k_tile_count,
                           int thread_idx, uint32_t block_rank_in_cluster,
                           TensorStorage& shared_tensors) {
    using namespace cute;
    if (!cute::elect_one_sync()) return;

    Tensor sA = make_tensor(make_smem_ptr(shared_tensors.smem_A.data()),
                            typename Base::SmemLayoutA{});  // (BLK_M,BLK_K,PIPE)
    Tensor sB = make_tensor(make_smem_ptr(shared_tensors.smem_B.data()),
                            typename Base::SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)

    constexpr uint32_t cluster_m = size<0>(ClusterShape{});
    uint32_t const cta_m = block_rank_in_cluster % cluster_m;
    uint32_t const cta_n = block_rank_in_cluster / cluster_m;
    auto const cta_tma_a = params.tma_load_a.get_slice(cta_n);
    auto const cta_tma_b = params.tma_load_b.get_slice(cta_m);

    auto [m_coord, n_coord, k_coord, l_coord] = blk_coord;

    // A tile that lies wholly in the local rows reads them where the caller has them; every other
    // tile reads gathered A for all of its rows, so that one load is never split.
    AsyncInput const& input = params.input;
    int32_t const tile_begin = int32_t(m_coord) * kTileM;
    Range const rows{tile_begin, min_of(tile_begin + kTileM, input.chunks.rows)};
    bool const is_local = !input.local_rows.empty() && input.local_rows.contains(rows);
    int32_t const row_offset = is_local ? -input.local_rows.begin : 0;

    Tensor gA = domain_offset(make_coord(row_offset, 0, 0),
                              get<0>(load_inputs)(_, _, m_coord, _, l_coord));  // (BLK_M,BLK_K,k)
    Tensor gB = get<1>(load_inputs)(_, _, n_coord, _, l_coord);                 // (BLK_N,BLK_K,k)
    Tensor tAgA = cta_tma_a.partition_S(gA);
    Tensor tAsA = cta_tma_a.partition_D(sA);
    Tensor tBgB = cta_tma_b.partition_S(gB);
    Tensor tBsB = cta_tma_b.partition_D(sB);

    uint16_t mcast_mask_a = 0;
    uint16_t mcast_mask_b = 0;
    auto const cluster_layout = Layout<ClusterShape>{};
    if constexpr (is_same_v<typename Base::GmemTiledCopyA, SM90_TMA_LOAD_MULTICAST>) {
      for (int n = 0; n < size<1>(cluster_layout); ++n) {
        mcast_mask_a |= uint16_t(1) << cluster_layout(cta_m, n, Int<0>{});
      }
    }
    if constexpr (is_same_v<typename Base::GmemTiledCopyB, SM90_TMA_LOAD_MULTICAST>) {
      for (int m = 0; m < size<0>(cluster_layout); ++m) {
        mcast_mask_b |= uint16_t(1) << cluster_layout(m, cta_n, Int<0>{});
      }
    }

    auto const load_a = [&](PipelineState const& stage, int k_tile) {
      TmaDescriptor const* const descriptor = is_local
                                                  ? params.tma_load_a_local.get_tma_descriptor()
                                                  : params.tma_load_a.get_tma_descriptor();
      copy(params.tma_load_a.with(descriptor, *pipeline.producer_get_barrier(stage), mcast_mask_a),
           tAgA(_, _, _, k_tile), tAsA(_, _, _, stage.index()));
    };
    // Every row of A is read by the one tile of its rows that lies in the first column.
    bool const stores_a = kCanStoreA && params.stores_a && n_coord == 0;
    auto const store_a = [&](PipelineState const& stage, int k_tile) {
      auto const tma = params.tma_store_a.get_slice(Int<0>{});
      Tensor mA = params.tma_store_a.get_tma_tensor(
          make_shape(input.chunks.rows, input.chunks.depth, Int<1>{}));
      Tensor gA_out =
          local_tile(mA, select<0, 2>(TileShape{}), make_coord(m_coord, k_tile, l_coord));
      pipeline.consumer_wait(stage);  // until the load has landed
      copy(params.tma_store_a, tma.partition_S(sA)(_, _, _, stage.index()),
           tma.partition_D(gA_out));
      tma_store_arrive();
    };
    auto const load_b = [&](PipelineState const& stage, int k_tile) {
      copy(params.tma_load_b.with(*pipeline.producer_get_barrier(stage), mcast_mask_b),
           tBgB(_, _, _, k_tile), tBsB(_, _, _, stage.index()));
    };

    int const k_begin = *k_tile_iter;
    int const timed_tile = timed_tile_of(input, m_coord, n_coord);
    if (kTimed && timed_tile >= 0) {
      TileTimes& times = input.tile_times[timed_tile];
      times.wait_begin_ns = times.wait_end_ns = global_timer_ns();
    }

    // The head of the tile: while A is awaited, fill the pipeline with B; then send A after it. All
    // of a tile's chunks are awaited here, those in K too; a wait inside the K loop would go where
    // the loop below loads A.
    int lead = 0;
    if (input.signals != nullptr && !is_local && tile_begin < input.chunks.rows &&
        !known_ready(input, tile_begin)) {
      int const max_lead = min_of(k_tile_count, int(Base::DispatchPolicy::Stages));
      PipelineState stage = smem_pipe_write;
      bool ready = all_ready(input, tile_begin);
      CUTLASS_PRAGMA_NO_UNROLL
      for (; lead < max_lead && !ready; ++lead, ++stage) {
        pipeline.producer_acquire(stage);
        load_b(stage, k_begin + lead);
        ready = all_ready(input, tile_begin);
      }
      if (!ready) wait_for_chunks(input, tile_begin);
      fence_proxy_async_all();
      remember_ready(input, tile_begin);
      if (kTimed && timed_tile >= 0) {
        input.tile_times[timed_tile].wait_end_ns = global_timer_ns();
      }
    }

    // A stage is stored kStoreLag loads after its own, when it has landed, and refilled when the
    // store has read it: kStages - kStoreLag loads later, so neither wait should cost anything.
    constexpr int kStages = Base::DispatchPolicy::Stages;
    constexpr int kStoreLag = kStages / 2;
    // The phase in which a stage is full is the other one of that in which it is free.
    PipelineState landed(smem_pipe_write.index(), smem_pipe_write.phase() ^ 1, 0);
    int const k_end = k_begin + k_tile_count;
    int const k_loaded_b = k_begin + lead;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k_tile = k_begin; k_tile < k_end; ++k_tile, ++smem_pipe_write) {
      if (k_tile >= k_loaded_b) {
        pipeline.producer_acquire(smem_pipe_write);
        load_b(smem_pipe_write, k_tile);
      }
      if (stores_a) tma_store_wait<kStages - 1 - kStoreLag>();
      load_a(smem_pipe_write, k_tile);
      if (stores_a && k_tile - k_begin >= kStoreLag) {
        store_a(landed, k_tile - kStoreLag);
        ++landed;
      }
    }
    if (stores_a) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int k_tile = max_of(k_begin, k_end - kStoreLag); k_tile < k_end; ++k_tile, ++landed) {
        store_a(landed, k_tile);
      }
      tma_store_wait<0>();  // the next tile's loads are not held against these stores
    }

    if (kTimed && timed_tile >= 0) {
      TileTimes& times = input.tile_times[timed_tile];
      times.loads_end_ns = global_timer_ns();
      asm volatile("mov.u32 %0, %%smid;" : "=r"(times.sm));
    }
  }

  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState smem_pipe_write) {
    if (!cute::elect_one_sync()) return;
    pipeline.producer_tail(smem_pipe_write);  // every load has landed and been consumed
    Release const& release = params_->input.release;
    if (release.signals == nullptr) return;
    uint32_t const ctas = gridDim.x * gridDim.y * gridDim.z;
    if (add_acq_rel_gpu(release.finished_ctas, 1) != ctas - 1) return;
    *release.finished_ctas = 0;
    for (int i = 0; i < release.signal_count; ++i) release.signals[i] = 0;
    for (int i = 0; i < release.peer_count; ++i) {
      if (release.peer_credits[i] != nullptr) store_release_system(release.peer_credits[i], 1);
    }
  }

 private:
  static constexpr int kTileM = cute::size<0>(TileShape{});

  CUTLASS_DEVICE static Range chunks_of(AsyncInput const& input, int32_t tile_begin) {
    return input.chunks.row_chunks({tile_begin, tile_begin + kTileM});
  }

  /// The signals of the tile's chunks, all of K: contiguous, since chunks_k is the minor direction.
  CUTLASS_DEVICE static Range signals_of(AsyncInput const& input, int32_t tile_begin) {
    Range const chunks = chunks_of(input, tile_begin);
    return {input.chunks.signal_index(chunks.begin, 0), input.chunks.signal_index(chunks.end, 0)};
  }

  CUTLASS_DEVICE static bool all_ready(AsyncInput const& input, int32_t tile_begin) {
    Range const signals = signals_of(input, tile_begin);
    bool ready = true;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t i = signals.begin; i < signals.end; ++i) {
      ready &= signal_ready(input.signals + i, input.ready_value, i, input.wait_limit);
    }
    return ready;
  }

  CUTLASS_DEVICE static void wait_for_chunks(AsyncInput const& input, int32_t tile_begin) {
    Range const signals = signals_of(input, tile_begin);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t i = signals.begin; i < signals.end; ++i) {
      wait_signal(input.signals + i, input.ready_value, i, input.wait_limit);
    }
  }

  // A chunk that was ready for one tile is ready for all later tiles of this CTA. The first 32 row
  // chunks are remembered; others are asked for again.
  CUTLASS_DEVICE bool known_ready(AsyncInput const& input, int32_t tile_begin) const {
    Range const chunks = chunks_of(input, tile_begin);
    return chunks.end <= 32 && (known_ready_ & mask_of(chunks)) == mask_of(chunks);
  }
  CUTLASS_DEVICE void remember_ready(AsyncInput const& input, int32_t tile_begin) {
    Range const chunks = chunks_of(input, tile_begin);
    if (chunks.end <= 32) known_ready_ |= mask_of(chunks);
  }
  CUTLASS_DEVICE static uint32_t mask_of(Range r) {
    return (~uint32_t(0) >> (32 - r.size())) << r.begin;
  }

  /// Index of the tile in tile_times, or -1 when it is not recorded.
  CUTLASS_DEVICE static int timed_tile_of(AsyncInput const& input, int32_t tile_m, int32_t tile_n) {
    bool const recorded = kTimed && input.tile_times != nullptr && tile_n < input.tiles_n &&
                          tile_m * kTileM < input.chunks.rows;
    return recorded ? tile_m * input.tiles_n + tile_n : -1;
  }

  Params const* params_ = nullptr;
  uint32_t known_ready_ = 0;
};

}  // namespace agmm
