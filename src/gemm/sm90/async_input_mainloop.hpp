// A TMA warp-specialised mainloop whose A arrives while the kernel runs: CUTLASS's sm90 collective
// with another producer. Here are the operands: where a tile of A or B lies, and how it is loaded
// and stored. When it may be loaded is ChunkGate's, in which order ProducerLoop's, which k tiles of
// the gathered A a tile stores StageStore's. A spare warp may help with the SM push transport, and
// the consumers with its first items; else their side is CUTLASS's.
#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cuda_host_adapter.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "gemm/sm90/chunk_gate.hpp"
#include "gemm/sm90/producer_loop.hpp"
#include "gemm/sm90/promoting_mma.hpp"
#include "gemm/sm90/stage_store.hpp"
#include "gemm/sm90/tile_timer.hpp"
#include "order/chunking.hpp"
#include "sync/device_release.hpp"
#include "testing/fault.hpp"
#include "testing/stress_delay.hpp"
#include "transport/push_cta.hpp"
#include "transport/push_warp.hpp"

namespace agmm {

struct AsyncInput {
  ChunkArrival arrival{};
  Range local_rows{};  // these rows are read from A_local and need no signal
  Release release{};
  TileTimes* tile_times = nullptr;  // null: not recorded
  FastDiv tiles_n{};
  int32_t k_tiles = 0;
};

/// Tells CUTLASS's kernels that the mainloop has work for their fourth producer warp.
template <class Base>
struct AsyncInputPolicy : Base {};

/// kTimed: records TileTimes; kSplits: takes the part of K that the scheduler says; kStoresA: may
/// store A (can_store_a); kPromotes: accumulates slowly. Variants of their own, because the
/// producer warp has no register to spare.
template <class Base, bool kTimed, bool kSplits, bool kStoresA, bool kPromotes>
struct AsyncInputMainloop : Base {
  using typename Base::ElementA;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TileShape;
  static_assert(!(kTimed && kSplits), "TileTimes are those of a tile's only CTA");
  static_assert(!kStoresA || cute::size<1>(typename Base::DispatchPolicy::ClusterShape{}) == 1);
  using DispatchPolicy = AsyncInputPolicy<typename Base::DispatchPolicy>;
  using ClusterShape = typename DispatchPolicy::ClusterShape;
  using TMA_A = typename Base::Params::TMA_A;

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
    if constexpr (kPromotes) {
      promoting_mma<Base>(pipeline, smem_pipe_read, accumulators, k_tile_count, thread_idx,
                          shared_tensors);
    } else {
      Base::mma(pipeline, smem_pipe_read, accumulators, k_tile_count, thread_idx, shared_tensors,
                params);
    }
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
    int32_t const m_tile = min_of(own_m_tile, (params.input.arrival.chunks.rows - 1) / kTileM);
    int32_t const n_tile = get<1>(blk_coord);

    // A tile that lies wholly in the local rows reads them where the caller has them; every other
    // tile reads gathered A for all of its rows, so that one load is never split.
    AsyncInput const& input = params.input;
    int32_t const tile_begin = m_tile * kTileM;
    Range const rows{tile_begin, min_of(tile_begin + kTileM, input.arrival.chunks.rows)};
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
      stress_delay(input.arrival.wait_limit.rank);
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
    auto const store_a = [&](int stage, int k_tile) {
      // Not &sA(0, 0, stage): where the buffer does not begin at a multiple of 1024 bytes, that
      // swizzles the address of the first element, and TMA wants the buffer's.
      SM90_TMA_STORE_3D::copy(params.tma_store_a.get_tma_descriptor(),
                              shared_tensors.smem_A.begin() + stage * kTileM * kTileK,
                              k_tile * kTileK, a_row + (is_local ? input.local_rows.begin : 0), 0);
      tma_store_arrive();
    };
    StageStore<kStoresA, kStages, decltype(store_a)> a_store(
        params.stores_a && m_tile == own_m_tile, input.tiles_n, n_tile, k_begin, store_a);
    auto const acquire_and_load_b = [&](PipelineState const& stage, int k_tile) {
      pipeline.producer_acquire(stage);
      bool const is_stored = a_store.before_refill(stage.index(), k_tile);
      copy(params.tma_load_b.with(*pipeline.producer_get_barrier(stage), mcast_mask_b),
           tBgB(_, _, _, k_tile), tBsB(_, _, _, stage.index()));
      if (is_stored) a_store.wait();
    };

    TileTimer<kTimed> const timer(input.tile_times,
                                  issues ? timed_tile_of(input, own_m_tile, n_tile) : -1);
    timer.begins();
    ChunkGate<kTileM, kTileK> gate(input.arrival, a_row, {k_begin, k_stop}, is_local);
    ProducerLoop const loop{gate, acquire_and_load_b, load_a};
    loop(smem_pipe_write, k_begin, issues, [&](bool is_first) { timer.found(is_first); });
    if constexpr (kNoWait) gate.look_too_late();
    if (issues) {
      a_store.finish(smem_pipe_write, k_stop, [&](PipelineState const& stage) {
        // The phase in which the stage is full. Not consumer_wait(): this warp is no consumer.
        MainloopPipeline::FullBarrier::wait(pipeline.producer_get_barrier(stage), stage.phase());
      });
    }
    // The kernel advances its own state, of which this is not a copy: a copy would take registers.
    // States come again after two turns of the ring.
    constexpr int kPeriod = 2 * kStages;
    int const advanced = k_stop - k_begin + (a_store.stores() ? kStages : 0);
    if (issues) smem_pipe_write.advance(kPeriod - advanced % kPeriod);

    timer.ends();
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
                                    params.input.arrival.wait_limit);
      } else {
        push_head(params.push, params.input.arrival.wait_limit);
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
    auto& queue = *reinterpret_cast<PushCta::Queue*>(shared_memory);
    // When most of the warps that push the head have found no more of it. Where consumers claim
    // the first items, only the warps of CTAs that got one go on.
    int32_t const head = params.push.order.head_count();
    int32_t const first_claims = kConsumersPush ? ctas_with_tiles : 0;
    int32_t const warps = kConsumersPush ? min_of(head, ctas_with_tiles) : ctas_with_tiles;
    int32_t const head_claims = max_of(head, first_claims) + warps * 3 / 4;
    if (push_tail(params.push, queue, head_claims, params.input.arrival.wait_limit)) finish(params);
  }

  /// How many warps finish() waits for.
  static int32_t finishing_warps(SmPushArgs const& push, int32_t ctas_with_tiles,
                                 int32_t other_ctas) {
    int32_t const beside = push.shard == nullptr ? 0 : ctas_with_tiles;
    return ctas_with_tiles + beside + other_ctas;
  }

 private:
  CUTLASS_DEVICE static void finish(Params const& params) {
    agmm::finish(params.input.release, params.finishing_warps, params.input.arrival.wait_limit);
  }

  static constexpr int kStages = Base::DispatchPolicy::Stages;
  static constexpr int kConsumers = cute::size(typename Base::TiledMma{});
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileK = cute::size<2>(TileShape{});

  /// Index of the tile in tile_times, or -1 when it is not recorded.
  CUTLASS_DEVICE static int timed_tile_of(AsyncInput const& input, int32_t tile_m, int32_t tile_n) {
    bool const recorded = kTimed && input.tile_times != nullptr && tile_n < input.tiles_n.divisor &&
                          tile_m * kTileM < input.arrival.chunks.rows;
    return recorded ? tile_m * input.tiles_n.divisor + tile_n : -1;
  }

  Params const* params_ = nullptr;
};

}  // namespace agmm

namespace cutlass::gemm::kernel::detail {

template <class Base>
struct HasAuxiliaryLoad<agmm::AsyncInputPolicy<Base>> : cute::true_type {};

}  // namespace cutlass::gemm::kernel::detail
