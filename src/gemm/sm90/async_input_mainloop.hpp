// A TMA warp-specialised mainloop whose A arrives while the kernel runs: CUTLASS's sm90 collective
// with another producer. Per k tile the producer warp issues B's load, acquires the signals of
// the chunks that the tile of A touches unless it has done so for this tile, and only then issues
// A's. Its 32 lanes look at 32 columns of chunks at once. Where the gathered A is wanted, each tile
// also stores a share of what it loaded. A spare warp may help with the SM push transport, and the
// consumers with its first items; else their side is CUTLASS's.
#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cuda_host_adapter.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "order/chunking.hpp"
#include "sync/device_wait.hpp"
#include "sync/release.hpp"
#include "testing/fault.hpp"
#include "testing/stress_delay.hpp"
#include "transport/push_warp.hpp"

namespace agmm {

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

/// Tells CUTLASS's kernels that the mainloop has work for their fourth producer warp.
template <class Base>
struct AsyncInputPolicy : Base {};

/// kTimed: records TileTimes; kSplits: takes the part of K that the scheduler says. Variants of
/// their own, because the producer warp has no register to spare.
template <class Base, bool kTimed = false, bool kSplits = false>
struct AsyncInputMainloop : Base {
  using typename Base::ElementA;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TileShape;
  static_assert(!(kTimed && kSplits), "TileTimes are those of a tile's only CTA");
  using DispatchPolicy = AsyncInputPolicy<typename Base::DispatchPolicy>;
  using ClusterShape = typename DispatchPolicy::ClusterShape;
  using TMA_A = typename Base::Params::TMA_A;

  /// Whether A can be stored. A stage has to be refilled with A by this CTA alone, whose producer
  /// knows when the store has read it; and tiles 192 and more wide, or larger than 128 x 256, of a
  /// row-major B, whose load takes several TMA instructions, leave the producer warp no register
  /// for it.
  static constexpr bool kCanStoreA =
      cute::size<1>(ClusterShape{}) == 1 &&
      !((cute::size<1>(TileShape{}) >= 192 ||
         cute::size<0>(TileShape{}) * cute::size<1>(TileShape{}) > 128 * 256) &&
        cute::is_constant<1, decltype(cute::get<0>(typename Base::StrideB{}))>::value);

  /// Whether the last rows of A, where they are no whole tile, have a descriptor of their own: TMA
  /// fills the rows of a tile beyond A so slowly (by inference 4 ns each) that a narrow tile, and
  /// its whole cluster, would wait for it. What the stage holds instead is multiplied but not
  /// stored.
  static constexpr bool kFitsLastRows = cute::size<1>(ClusterShape{}) == 1;

  /// Whether the consumers push the first items: where all of them multiply the same tile.
  static constexpr bool kConsumersPush =
      cute::is_base_of_v<cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                         typename DispatchPolicy::Schedule>;

  struct TensorStorage : Base::TensorStorage {
    FirstItem first_item;
  };

  struct Arguments : Base::Arguments {
    ElementA const* ptr_A_local = nullptr;  // [local rows, K], rows local_rows.begin ... of A
    ElementA* ptr_A_out = nullptr;          // [M, K] with A's strides: all of A is written; or null
    AsyncInput input{};
    SmPushArgs push{};
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

  /// As make_tma_copy's for A, but for the number of rows, which cute wants at compile time. All
  /// zeros, as cute's, where the driver refuses it.
  static cute::TmaDescriptor last_rows_descriptor(ElementA const* ptr, int32_t m, int32_t k,
                                                  typename Base::StrideA const& stride,
                                                  int32_t last_rows) {
    using namespace cute;
    static_assert(is_same_v<typename Base::SmemLayoutAtomA, GMMA::Layout_K_SW128_Atom<ElementA>>);
    uint64_t const shape[] = {uint64_t(k), uint64_t(m)};
    uint64_t const row_bytes[] = {uint64_t(get<0>(stride)) * sizeof(ElementA)};
    uint32_t const box[] = {uint32_t(kTileK), uint32_t(last_rows)};
    uint32_t const steps[] = {1, 1};
    TmaDescriptor descriptor{};
    CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &descriptor, TMA::to_CUtensorMapDataType<ElementA>(), 2, const_cast<ElementA*>(ptr), shape,
        row_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? descriptor : TmaDescriptor{};
  }

  struct Params : Base::Params {
    TMA_A tma_load_a_local;
    TMA_A_Store tma_store_a;
    cute::TmaDescriptor last_rows_a;  // of A or A_local; of no use where tiles divide M
    bool stores_a = false;
    AsyncInput input;
    SmPushArgs push;
    int32_t finishing_warps = 1;  // of the whole grid
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
    auto last_rows_a = *base.tma_load_a.get_tma_descriptor();
    if (kFitsLastRows && m % kTileM != 0) {
      bool const is_local = args.input.local_rows.contains({m / kTileM * kTileM, m});
      last_rows_a =
          last_rows_descriptor(is_local ? args.ptr_A_local : args.ptr_A,
                               is_local ? args.input.local_rows.size() : m, k, args.dA, m % kTileM);
    }
    return {base, local, store, last_rows_a, stores_a, args.input, args.push, 1};
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    cute::prefetch_tma_descriptor(params.tma_load_a_local.get_tma_descriptor());
    if constexpr (kFitsLastRows) cute::prefetch_tma_descriptor(&params.last_rows_a);
  }

  /// At the entry of a CTA with a tile, for all threads. The warp that claims is the first of
  /// mma(), where CUTLASS counts the consumers' threads modulo their number.
  CUTLASS_DEVICE static void claim_first_item(Params const& params, TensorStorage& storage) {
    if (kConsumersPush && params.push.shard != nullptr &&
        cutlass::canonical_warp_idx_sync() == kConsumers / cutlass::NumThreadsPerWarp) {
      agmm::claim_first_item(params.push, storage.first_item);
    }
  }

  template <class FrgTensorC>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState smem_pipe_read,
                          FrgTensorC& accumulators, int k_tile_count, int thread_idx,
                          TensorStorage& shared_tensors, Params const& params) {
    if constexpr (kConsumersPush) {
      bool const is_first_tile = smem_pipe_read.count() == 0;
      if (is_first_tile && params.push.shard != nullptr) {
        copy_first_item<kConsumers>(params.push, shared_tensors.first_item, thread_idx);
      }
    }
    Base::mma(pipeline, smem_pipe_read, accumulators, k_tile_count, thread_idx, shared_tensors,
              params);
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
    // Lane 0, which the pipeline counts on, issues.
    bool const issues = cute::elect_one_sync();

    Tensor sA = make_tensor(make_smem_ptr(shared_tensors.smem_A.data()),
                            typename Base::SmemLayoutA{});  // (BLK_M,BLK_K,PIPE)
    Tensor sB = make_tensor(make_smem_ptr(shared_tensors.smem_B.data()),
                            typename Base::SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)

    constexpr uint32_t cluster_m = size<0>(ClusterShape{});
    uint32_t const cta_m = block_rank_in_cluster % cluster_m;
    uint32_t const cta_n = block_rank_in_cluster / cluster_m;
    auto const cta_tma_a = params.tma_load_a.get_slice(cta_n);
    auto const cta_tma_b = params.tma_load_b.get_slice(cta_m);

    int const k_begin = kSplits ? int(*k_tile_iter) : 0;
    int const k_stop = kSplits ? k_begin + k_tile_count : params.input.k_tiles;
    // A CTA whose rows only pad the cluster takes those before: TMA fills what is out of bounds so
    // slowly that the whole cluster would wait for it. Its products are not stored.
    int32_t const own_m_tile = get<0>(blk_coord);
    int32_t const m_tile = min_of(own_m_tile, (params.input.chunks.rows - 1) / kTileM);
    int32_t const n_tile = get<1>(blk_coord);

    // A tile that lies wholly in the local rows reads them where the caller has them; every other
    // tile reads gathered A for all of its rows, so that one load is never split.
    AsyncInput const& input = params.input;
    int32_t const tile_begin = m_tile * kTileM;
    Range const rows{tile_begin, min_of(tile_begin + kTileM, input.chunks.rows)};
    bool const is_local = !input.local_rows.empty() && input.local_rows.contains(rows);
    int32_t const a_row = tile_begin - (is_local ? input.local_rows.begin : 0);
    bool const is_partial = rows.size() < kTileM;

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
      stress_delay(input.wait_limit.rank);
      if constexpr (kFitsLastRows) {
        if (is_partial) {
          auto* const barrier = pipeline.producer_get_barrier(stage);
          SM90_TMA_LOAD_2D::copy(&params.last_rows_a, barrier,
                                 static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL),
                                 shared_tensors.smem_A.begin() + stage.index() * kTileM * kTileK,
                                 k_tile * kTileK, a_row);
          // What the barrier expects of a whole tile.
          MainloopPipeline::FullBarrier::complete_transaction(
              barrier, block_rank_in_cluster,
              static_cast<uint32_t>((kTileM - rows.size()) * kTileK * sizeof(ElementA)));
          return;
        }
      }
      TmaDescriptor const* const descriptor = is_local
                                                  ? params.tma_load_a_local.get_tma_descriptor()
                                                  : params.tma_load_a.get_tma_descriptor();
      copy(params.tma_load_a.with(descriptor, *pipeline.producer_get_barrier(stage), mcast_mask_a),
           tAgA(_, _, _, k_tile), tAsA(_, _, _, stage.index()));
    };
    // The tiles of one row of tiles all read the same rows of A; each stores its share of the k
    // tiles, since the stores of all of A by one column of tiles do not keep up with its loads.
    // Only the next of them is kept: where the producer's step is longer than a stage's MMAs, as it
    // soon is with small tiles, it is what bounds the kernel.
    bool const stores = kCanStoreA && params.stores_a && m_tile == own_m_tile;
    int next_store = kNever;
    if (stores) {
      int const ahead = n_tile - input.tiles_n.remainder(k_begin);
      next_store = k_begin + (ahead < 0 ? ahead + input.tiles_n.divisor : ahead);
    }
    auto const store_a = [&](int stage, int k_tile) {
      // Not &sA(0, 0, stage): where the buffer does not begin at a multiple of 1024 bytes, that
      // swizzles the address of the first element, and TMA wants the buffer's.
      SM90_TMA_STORE_3D::copy(params.tma_store_a.get_tma_descriptor(),
                              shared_tensors.smem_A.begin() + stage * kTileM * kTileK,
                              k_tile * kTileK, a_row + (is_local ? input.local_rows.begin : 0), 0);
      tma_store_arrive();
    };
    auto const load_b = [&](PipelineState const& stage, int k_tile) {
      copy(params.tma_load_b.with(*pipeline.producer_get_barrier(stage), mcast_mask_b),
           tBgB(_, _, _, k_tile), tBsB(_, _, _, stage.index()));
    };

    auto const acquire_for_b = [&](PipelineState const& stage, int k_tile) {
      pipeline.producer_acquire(stage);
      // What the stage still holds of A has landed, since it has been consumed. The other stages
      // keep the consumers busy while it is stored.
      bool const is_stored = kCanStoreA && k_tile - kStages == next_store;
      if (is_stored) {
        store_a(stage.index(), next_store);
        next_store += input.tiles_n.divisor;
      }
      load_b(stage, k_tile);
      if (is_stored) tma_store_wait<0>();  // until it has been read
    };

    int const timed_tile = timed_tile_of(input, own_m_tile, n_tile);
    if (kTimed && issues && timed_tile >= 0) {
      TileTimes& times = input.tile_times[timed_tile];
      times.wait_begin_ns = times.wait_end_ns = times.found_ns = global_timer_ns();
    }

    // Column chunks known to have arrived.
    bool const awaits = input.signals != nullptr && !is_local;
    int ready = awaits && !kNoWait ? k_begin * kTileK / input.chunks.columns_per_chunk
                                   : input.chunks.chunks_k;
    // All lanes look at signals together; in between lane 0 alone issues all that has arrived. If
    // that is nothing it sends for B's next tile, once.
    int k_tile = k_begin;
    bool has_stage = false;
    bool b_ahead = false;
    CUTLASS_PRAGMA_NO_UNROLL
    for (;;) {
      int const k_end = ready == input.chunks.chunks_k
                            ? k_stop
                            : min_of(k_stop, ready * input.chunks.columns_per_chunk / kTileK);
      if (issues) {
        if (has_stage && k_tile < k_end) {
          load_a(smem_pipe_write, k_tile);
          has_stage = false;
          ++k_tile;
          ++smem_pipe_write;
        }
        int const b_end = b_ahead && !has_stage ? k_end + 1 : k_end;
        CUTLASS_PRAGMA_NO_UNROLL
        for (; k_tile < b_end; ++k_tile, ++smem_pipe_write) {
          acquire_for_b(smem_pipe_write, k_tile);
          has_stage = k_tile == k_end;
          if (has_stage) break;
          load_a(smem_pipe_write, k_tile);
        }
      }
      __syncwarp();
      if (k_end == k_stop) break;
      int const arrived = look(input, a_row, ready, b_ahead);
      b_ahead = arrived == 0;
      if (b_ahead) continue;
      fence_proxy_async_global();
      ready += arrived;
      if (kTimed && issues && timed_tile >= 0) {
        TileTimes& times = input.tile_times[timed_tile];
        times.found_ns = global_timer_ns();
        if (k_tile == k_begin) times.wait_end_ns = times.found_ns;
      }
    }
    if constexpr (kNoWait) {
      // Signals and credits stay in step, so that wrong elements are all that comes of it.
      for (ready = 0; awaits && ready < input.chunks.chunks_k;) {
        ready += look(input, a_row, ready, true);
      }
    }
    if constexpr (kCanStoreA) {
      if (issues && stores) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (k_tile = k_stop - kStages; k_tile < k_stop; ++k_tile, ++smem_pipe_write) {
          if (k_tile != next_store) continue;
          next_store += input.tiles_n.divisor;
          // The phase in which the stage is full. Not consumer_wait(): this warp is no consumer.
          MainloopPipeline::FullBarrier::wait(pipeline.producer_get_barrier(smem_pipe_write),
                                              smem_pipe_write.phase());
          store_a(smem_pipe_write.index(), k_tile);
        }
        tma_store_wait<0>();  // the next tile's loads are not held against these stores
      }
    }
    // The kernel advances its own state, of which this is not a copy: a copy would take registers.
    // States come again after two turns of the ring.
    constexpr int kPeriod = 2 * kStages;
    int const advanced = k_stop - k_begin + (stores ? kStages : 0);
    if (issues) smem_pipe_write.advance(kPeriod - advanced % kPeriod);

    if (kTimed && issues && timed_tile >= 0) {
      TileTimes& times = input.tile_times[timed_tile];
      times.loads_end_ns = global_timer_ns();
      asm volatile("mov.u32 %0, %%smid;" : "=r"(times.sm));
    }
  }

  /// The fourth producer warp's only work. It exits here: what the kernel would keep for its next
  /// tile takes registers that the push needs. Every CTA with a tile comes here once, the others
  /// never.
  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load_auxiliary(Params const& params, MainloopPipeline, PipelineState,
                                     cute::tuple<TensorA, TensorB> const&, BlockCoord const&,
                                     KTileIterator, int, int, uint32_t,
                                     TensorStorage& shared_tensors) {
    if (params.push.shard != nullptr) {
      if constexpr (kConsumersPush) {
        push_head_after<kConsumers>(shared_tensors.first_item, params.push,
                                    params.input.wait_limit);
      } else {
        push_head(params.push, params.input.wait_limit);
      }
      finish(params);
    }
    asm volatile("exit;");
    __builtin_unreachable();
  }

  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState smem_pipe_write) {
    // Until every load has landed. While the consumers go on with what is in the stages, the
    // buffers are given back, and the last warp awaits the copies of this rank's shard.
    PipelineState stage = smem_pipe_write;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < kStages; ++i, ++stage) {
      MainloopPipeline::FullBarrier::wait(pipeline.producer_get_barrier(stage), stage.phase());
    }
    finish(*params_);
    if (cute::elect_one_sync()) pipeline.producer_tail(smem_pipe_write);
  }

  /// The whole work of a CTA without a tile.
  CUTLASS_DEVICE static void push_only(Params const& params, int32_t ctas_with_tiles,
                                       char* shared_memory) {
    auto& slots = *reinterpret_cast<PushCta::Slots*>(shared_memory);
    // When most of the warps that push the head have found no more of it. Where consumers claim
    // the first items, only the warps of CTAs that got one go on.
    int32_t const head = params.push.order.head_count();
    int32_t const first_claims = kConsumersPush ? ctas_with_tiles : 0;
    int32_t const warps = kConsumersPush ? min_of(head, ctas_with_tiles) : ctas_with_tiles;
    int32_t const head_claims = max_of(head, first_claims) + warps * 3 / 4;
    if (push_tail(params.push, slots, head_claims, params.input.wait_limit)) finish(params);
  }

  /// How many warps finish() waits for.
  static int32_t finishing_warps(SmPushArgs const& push, int32_t ctas_with_tiles,
                                 int32_t other_ctas) {
    int32_t const beside = push.shard == nullptr ? 0 : ctas_with_tiles;
    return ctas_with_tiles + beside + other_ctas;
  }

 private:
  CUTLASS_DEVICE static void finish(Params const& params) {
    agmm::finish(params.input.release, params.finishing_warps, params.input.wait_limit);
  }

  static constexpr int kStages = Base::DispatchPolicy::Stages;
  static constexpr int kConsumers = cute::size(typename Base::TiledMma{});
  static constexpr int kNever = 1 << 30;
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileK = cute::size<2>(TileShape{});

  CUTLASS_DEVICE static Range chunks_of(AsyncInput const& input, int32_t tile_begin) {
    return input.chunks.row_chunks({tile_begin, tile_begin + kTileM});
  }

  /// How many columns of chunks from `first` on are there for the tile's rows, acquired; at most
  /// one per lane. `waits`: until there is one.
  CUTLASS_DEVICE static int look(AsyncInput const& input, int32_t tile_begin, int32_t first,
                                 bool waits) {
    stress_delay_warp(input.wait_limit.rank);
    uint32_t since = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (;;) {
      Range const chunks = chunks_of(input, tile_begin);
      int32_t const chunk_k = first + lane_id();
      bool is_ready = chunk_k < input.chunks.chunks_k;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t chunk_m = chunks.begin; is_ready && chunk_m < chunks.end; ++chunk_m) {
        int32_t const i = input.chunks.signal_index(chunk_m, chunk_k);
        uint32_t const seen =
            look_at_signal(input.signals + i, input.ready_value, i, input.wait_limit);
        is_ready = seen == input.ready_value;
        if (!is_ready && lane_id() == 0) {
          check_wait(seen, input.ready_value, i, input.wait_limit, since);
        }
      }
      __syncwarp();
      // The lanes below the first one whose chunks are not there; all where there is none.
      uint32_t const missing = ~__ballot_sync(0xffffffffu, is_ready);
      int const arrived = missing == 0 ? 32 : __ffs(int(missing)) - 1;
      if (arrived != 0 || !waits) return arrived;
    }
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

namespace cutlass::gemm::kernel::detail {

template <class Base>
struct HasAuxiliaryLoad<agmm::AsyncInputPolicy<Base>> : cute::true_type {};

}  // namespace cutlass::gemm::kernel::detail
