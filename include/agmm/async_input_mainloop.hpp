// A TMA warp-specialised mainloop whose A arrives while the kernel runs: CUTLASS's sm90 collective
// with another producer. Per k tile the producer thread issues B's load, acquires the signals of
// the chunks that the tile of A touches unless it has done so for this tile, and only then issues
// A's. Where the gathered A is wanted, each tile also stores a share of what it loaded. The
// consumer side is inherited unchanged.
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
  FastDiv tiles_n{};
  int32_t k_tiles = 0;
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

  /// Whether A can be stored. A stage has to be refilled with A by this CTA alone, whose producer
  /// knows when the store has read it; and tiles 192 and more wide of a row-major B, whose load
  /// takes several TMA instructions, leave the producer warp no register for it.
  static constexpr bool kCanStoreA =
      cute::size<1>(ClusterShape{}) == 1 &&
      !(cute::size<1>(TileShape{}) >= 192 &&
        cute::is_constant<1, decltype(cute::get<0>(typename Base::StrideB{}))>::value);

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
    // 0 where A is stored, else what no tile's column comes up to: a test of its own would take a
    // register.
    int32_t no_store_offset = 0;
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
    return {base, local, store, stores_a ? 0 : 1 << 30, args.input};
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
                           PipelineState& smem_pipe_write,
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

    int32_t const m_tile = get<0>(blk_coord);
    int32_t const n_tile = get<1>(blk_coord);

    // A tile that lies wholly in the local rows reads them where the caller has them; every other
    // tile reads gathered A for all of its rows, so that one load is never split.
    AsyncInput const& input = params.input;
    int32_t const tile_begin = m_tile * kTileM;
    Range const rows{tile_begin, min_of(tile_begin + kTileM, input.chunks.rows)};
    bool const is_local = !input.local_rows.empty() && input.local_rows.contains(rows);
    int32_t const a_row = tile_begin - (is_local ? input.local_rows.begin : 0);

    Tensor gA = domain_offset(make_coord(a_row, 0, 0),
                              get<0>(load_inputs)(_, _, 0, _, 0));  // (BLK_M,BLK_K,k)
    Tensor gB = get<1>(load_inputs)(_, _, n_tile, _, 0);            // (BLK_N,BLK_K,k)
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
    // The tiles of one row of tiles all read the same rows of A; each stores its share of the k
    // tiles, since the stores of all of A by one column of tiles do not keep up with its loads.
    auto const is_to_store = [&](int k_tile) {
      return kCanStoreA && k_tile >= 0 &&
             input.tiles_n.remainder(k_tile) == n_tile + params.no_store_offset;
    };
    auto const store_a = [&](int stage, int k_tile) {
      SM90_TMA_STORE_3D::copy(params.tma_store_a.get_tma_descriptor(), &sA(0, 0, stage),
                              k_tile * kTileK, a_row + (is_local ? input.local_rows.begin : 0), 0);
      tma_store_arrive();
    };
    auto const load_b = [&](PipelineState const& stage, int k_tile) {
      copy(params.tma_load_b.with(*pipeline.producer_get_barrier(stage), mcast_mask_b),
           tBgB(_, _, _, k_tile), tBsB(_, _, _, stage.index()));
    };

    int const timed_tile = timed_tile_of(input, m_tile, n_tile);
    if (kTimed && timed_tile >= 0) {
      TileTimes& times = input.tile_times[timed_tile];
      times.wait_begin_ns = times.wait_end_ns = global_timer_ns();
    }

    // Column chunks known to have arrived. No signal says that rows are there which only pad the
    // grid.
    bool const awaits = input.signals != nullptr && !is_local && tile_begin < input.chunks.rows;
    int chunk_k = awaits ? 0 : input.chunks.chunks_k;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k_tile = 0; k_tile < input.k_tiles; ++k_tile, ++smem_pipe_write) {
      // The first look at the signals comes before the wait for the stage, which hides its latency;
      // if A is not there yet, B is sent for before the next look.
      uint32_t since = 0;
      bool has_stage = false;
      CUTLASS_PRAGMA_NO_UNROLL
      for (;;) {
        if (chunk_k < input.chunks.chunks_k &&
            (k_tile + 1) * kTileK > chunk_k * input.chunks.columns_per_chunk) {
          if (is_ready(input, a_row, chunk_k, since)) {
            fence_proxy_async_global();
            ++chunk_k;
            since = 0;
            if (kTimed && timed_tile >= 0 && chunk_k == input.chunks.chunks_k) {
              input.tile_times[timed_tile].wait_end_ns = global_timer_ns();
            }
            continue;
          }
          if (has_stage) continue;
        } else if (has_stage) {
          break;
        }
        pipeline.producer_acquire(smem_pipe_write);
        // What the stage still holds of A has landed, since it has been consumed. The other stages
        // keep the consumers busy while it is stored.
        if (is_to_store(k_tile - kStages)) store_a(smem_pipe_write.index(), k_tile - kStages);
        load_b(smem_pipe_write, k_tile);
        has_stage = true;
      }
      if constexpr (kCanStoreA) tma_store_wait<0>();  // until what was stored has been read
      load_a(smem_pipe_write, k_tile);
    }
    if constexpr (kCanStoreA) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int k_tile = input.k_tiles - kStages; k_tile < input.k_tiles;
           ++k_tile, ++smem_pipe_write) {
        if (!is_to_store(k_tile)) continue;
        // The phase in which the stage is full. Not consumer_wait(): this warp is no consumer.
        MainloopPipeline::FullBarrier::wait(pipeline.producer_get_barrier(smem_pipe_write),
                                            smem_pipe_write.phase());
        store_a(smem_pipe_write.index(), k_tile);
      }
      tma_store_wait<0>();  // the next tile's loads are not held against these stores
    }
    // The kernel advances its own state, of which this is not a copy: a copy would take registers.
    // States come again after two turns of the ring.
    constexpr int kPeriod = 2 * kStages;
    int const advanced = input.k_tiles + (kCanStoreA ? kStages : 0);
    smem_pipe_write.advance(kPeriod - advanced % kPeriod);

    if (kTimed && timed_tile >= 0) {
      TileTimes& times = input.tile_times[timed_tile];
      times.loads_end_ns = global_timer_ns();
      asm volatile("mov.u32 %0, %%smid;" : "=r"(times.sm));
    }
  }

  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState smem_pipe_write) {
    if (!cute::elect_one_sync()) return;
    pipeline.producer_tail(smem_pipe_write);  // every load has landed and been consumed
    give_back(params_->input.release);
    // What this kernel was launched beside has to be over when this kernel is.
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }

 private:
  CUTLASS_DEVICE static void give_back(Release const& release) {
    if (release.signals == nullptr) return;
    uint32_t const ctas = gridDim.x * gridDim.y * gridDim.z;
    if (add_acq_rel_gpu(release.finished_ctas, 1) != ctas - 1) return;
    *release.finished_ctas = 0;
    for (int i = 0; i < release.signal_count; ++i) release.signals[i] = 0;
    for (int i = 0; i < release.peer_count; ++i) {
      if (release.peer_credits[i] != nullptr) store_release_system(release.peer_credits[i], 1);
    }
  }

  static constexpr int kStages = Base::DispatchPolicy::Stages;
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileK = cute::size<2>(TileShape{});

  CUTLASS_DEVICE static Range chunks_of(AsyncInput const& input, int32_t tile_begin) {
    return input.chunks.row_chunks({tile_begin, tile_begin + kTileM});
  }

  /// Whether a column of chunks of the tile's rows is there, acquired. `since`: see signal_ready.
  CUTLASS_DEVICE static bool is_ready(AsyncInput const& input, int32_t tile_begin, int32_t chunk_k,
                                      uint32_t& since) {
    Range const chunks = chunks_of(input, tile_begin);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t chunk_m = chunks.begin; chunk_m < chunks.end; ++chunk_m) {
      int32_t const i = input.chunks.signal_index(chunk_m, chunk_k);
      if (!signal_ready(input.signals + i, input.ready_value, i, input.wait_limit, since)) {
        return false;
      }
    }
    return true;
  }

  /// Index of the tile in tile_times, or -1 when it is not recorded.
  CUTLASS_DEVICE static int timed_tile_of(AsyncInput const& input, int32_t tile_m, int32_t tile_n) {
    bool const recorded = kTimed && input.tile_times != nullptr && tile_n < input.tiles_n.divisor &&
                          tile_m * kTileM < input.chunks.rows;
    return recorded ? tile_m * input.tiles_n.divisor + tile_n : -1;
  }

  Params const* params_ = nullptr;
};

}  // namespace agmm
