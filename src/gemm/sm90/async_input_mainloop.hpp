// A TMA warp-specialised mainloop whose A arrives while the kernel runs: CUTLASS's sm90 collective
// with another producer. Here are the operands: where a tile of A or B lies, and how it is loaded
// and stored. When it may be loaded is ChunkGate's, in which order ProducerLoop's, which k tiles of
// the gathered A a tile stores StageStore's. A is what arrives, whichever of the MMA's two operands
// it is. A spare warp may help with the SM push transport, and the consumers with its first items;
// else their side is CUTLASS's.
#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cuda_host_adapter.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "gemm/sm90/block_scales.hpp"
#include "gemm/sm90/box_descriptor.hpp"
#include "gemm/sm90/chunk_gate.hpp"
#include "gemm/sm90/cluster_split.hpp"
#include "gemm/sm90/halves_of_b.hpp"
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
  bool starts_early = false;  // for the launch
};

/// Policy: the epilogue's, for sums that the mainloop stores; kSwapped: A is the MMA's second
/// operand, whose rows are columns of the MMA (KernelShape); kTimed: records TileTimes; kSplits:
/// takes the split of K that the scheduler says; kStoresA: may store A (can_store_a); kMayPush_:
/// may push this rank's shard. Variants of their own, because the producer warp has no register to
/// spare, and code that lies between what runs costs time. With an epilogue of two columns of B for
/// one of out, B is two weights of half the columns (HalvesOfB), each loaded from where it lies.
template <class Base, class Policy, bool kSwapped, bool kTimed, bool kSplits, bool kStoresA,
          Accumulation kAccumulation, bool kMayPush_>
struct AsyncInputMainloop : Base {
  using typename Base::DispatchPolicy;
  using typename Base::PipelineState;
  using typename Base::TileShape;
  using ClusterShape = typename DispatchPolicy::ClusterShape;

  /// Which operands of the MMA A and B are, and so which modes of a tile, of a cluster and of the
  /// problem their rows are.
  static constexpr int kA = kSwapped ? 1 : 0;
  static constexpr int kB = 1 - kA;
  static constexpr int kTileRows = cute::size<kA>(TileShape{});     // of A
  static constexpr int kTileColumns = cute::size<kB>(TileShape{});  // of B
  static constexpr int kTileK = cute::size<2>(TileShape{});
  template <class OfFirst, class OfSecond>
  using OfA = cute::conditional_t<kSwapped, OfSecond, OfFirst>;
  template <class OfFirst, class OfSecond>
  using OfB = cute::conditional_t<kSwapped, OfFirst, OfSecond>;
  using Element = OfA<typename Base::ElementA, typename Base::ElementB>;  // A's
  using StrideOfA = OfA<typename Base::StrideA, typename Base::StrideB>;
  using SmemLayoutOfA = OfA<typename Base::SmemLayoutA, typename Base::SmemLayoutB>;
  using SmemLayoutOfB = OfB<typename Base::SmemLayoutA, typename Base::SmemLayoutB>;
  using TmaLoadOfA = OfA<typename Base::Params::TMA_A, typename Base::Params::TMA_B>;

  /// Whether no other CTA of the cluster has a part in the loads of A.
  static constexpr bool kLoadsAAlone = cute::size<kB>(ClusterShape{}) == 1;

  static_assert(!(kTimed && kSplits), "TileTimes are those of a tile's only CTA");
  static_assert(!kStoresA || kLoadsAAlone);

  /// Whether the last rows of A, where they are no whole tile, have a descriptor of their own: TMA
  /// fills the rows of a tile beyond A so slowly (by inference 4 ns each) that a narrow tile, and
  /// its whole cluster, would wait for it. What the stage holds instead is multiplied but not
  /// stored.
  static constexpr bool kFitsLastRows = kLoadsAAlone;

  /// Whether the consumers read the scales of A from where they have arrived. They learn that from
  /// the stage: its producer acquires the rows' signals, then arrives at the stage's barrier, which
  /// they acquire. So it must not arrive before it knows that the rows are there, which it does
  /// where it loads B ahead of A. TMA would carry no order from the gate to them by itself.
  static constexpr bool kReadsScales = sizeof(Element) == 1;

  static constexpr bool kMayPush = kMayPush_;
  static constexpr bool kCooperative =
      cute::is_base_of_v<cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                         typename DispatchPolicy::Schedule>;
  /// Whether the consumers push the first items: where all of them multiply the same tile.
  static constexpr bool kConsumersPush = kMayPush && kCooperative;

  /// Whether the splits of K are a cluster's, which adds up and stores the tile here
  /// (splits_in_cluster).
  static constexpr bool kSplitsInCluster =
      kSplits && kSwapped && kCooperative && cute::size(ClusterShape{}) == 1;
  using MainloopPipeline =
      cute::conditional_t<kSplitsInCluster, OwnStagesPipeline<typename Base::MainloopPipeline>,
                          typename Base::MainloopPipeline>;

  /// Block scales are the mainloop's, not the epilogue's.
  using Scaling = MainloopScales<Base, kAccumulation, Policy::kColumnsPerOut == 2>;
  static constexpr bool kScalesBlocks = Scaling::kScalesBlocks;
  static_assert(!kScalesBlocks || (!kSwapped && !kSplits));
  using SumsLayout = typename Scaling::SumsLayout;
  using ScalesOfBlocks = typename Scaling::Scales;
  struct TensorStorage : Base::TensorStorage, Scaling::Storage {
    FirstItem first_item;
    uint32_t seen;         // signals: see ChunkGate
    TileStart first_tile;  // where splits of K are a cluster's
  };
  /// Where the sums of those tiles go that the mainloop stores.
  struct NoSumsOut {};
  using ClusterSumsOut = cute::conditional_t<kSplitsInCluster, SumsOut<Policy>, NoSumsOut>;

  /// Whether B is two weights, gate and up: then the first half of a tile's columns are gate's.
  static constexpr bool kIsGated = Policy::kColumnsPerOut == 2;
  using ScaleArgs = cute::conditional_t<kIsGated, GatedBlockScaleArgs, BlockScaleArgs>;
  struct NoHalves {};
  using Halves = cute::conditional_t<kIsGated,
                                     HalvesOfB<typename Base::ElementB, typename Base::StrideB,
                                               typename Base::SmemLayoutB, TileShape, ClusterShape>,
                                     NoHalves>;
  static_assert(!kIsGated || (!kSwapped && !kSplits));

  struct Arguments : Base::Arguments, HalvesArguments<kIsGated> {
    Element const* ptr_A_local = nullptr;  // [local rows, K], rows local_rows.begin ... of A
    Element* ptr_A_out = nullptr;          // [M, K] with A's strides: all of A is written; or null
    AsyncInput input{};
    SmPushArgs push{};
    ScaleArgs block_scales{};
    ClusterSumsOut sums_out{};
  };

  static auto make_tma_store_a(Element* ptr, int32_t rows, int32_t k, int32_t l,
                               StrideOfA const& stride) {
    using namespace cute;
    return make_tma_copy(
        SM90_TMA_STORE{},
        make_tensor(make_gmem_ptr(ptr), make_layout(make_shape(rows, k, l), stride)),
        SmemLayoutOfA{}(_, _, Int<0>{}), make_shape(shape<kA>(TileShape{}), shape<2>(TileShape{})),
        _1{});
  }
  using TmaStoreOfA = decltype(make_tma_store_a(nullptr, 0, 0, 0, StrideOfA{}));

  /// The descriptor that make_tma_copy makes for A, but for the number of rows, which cute wants at
  /// compile time. It is all zeros, like cute's, where the driver refuses it.
  static cute::TmaDescriptor last_rows_descriptor(Element const* ptr, int32_t rows, int32_t k,
                                                  StrideOfA const& stride, int32_t last_rows) {
    using namespace cute;
    static_assert(is_same_v<OfA<typename Base::SmemLayoutAtomA, typename Base::SmemLayoutAtomB>,
                            GMMA::Layout_K_SW128_Atom<Element>>);
    return box_descriptor(ptr, {k, rows}, get<0>(stride), {kBoxColumns, last_rows});
  }

  struct Params : Base::Params, cute::conditional_t<kIsGated, HalvesParams, NoHalves> {
    TmaLoadOfA tma_load_a_local;
    TmaStoreOfA tma_store_a;
    cute::TmaDescriptor last_rows_a;  // of A or A_local; of no use where tiles divide M
    bool stores_a = false;
    AsyncInput input;
    SmPushArgs push;
    int32_t finishing_warps = 1;  // of the whole grid
    ScaleArgs block_scales{};
    ClusterSumsOut sums_out{};
  };

  /// The TMA load of one of the MMA's operands.
  template <int kOperand, class BaseParams>
  CUTLASS_HOST_DEVICE static auto const& tma_load_of(BaseParams const& params) {
    if constexpr (kOperand == 0) {
      return params.tma_load_a;
    } else {
      return params.tma_load_b;
    }
  }
  template <int kOperand>
  CUTLASS_DEVICE static auto& smem_of(TensorStorage& storage) {
    if constexpr (kOperand == 0) {
      return storage.smem_A;
    } else {
      return storage.smem_B;
    }
  }
  static auto& ptr_of_a(typename Base::Arguments& args) {
    if constexpr (kSwapped) {
      return args.ptr_B;
    } else {
      return args.ptr_A;
    }
  }
  static StrideOfA& stride_of_a(typename Base::Arguments& args) {
    if constexpr (kSwapped) {
      return args.dB;
    } else {
      return args.dA;
    }
  }

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args,
                                        void* workspace) {
    auto of_weight = problem;  // of one weight
    cute::get<kB>(of_weight) = cute::get<kB>(problem) / Policy::kColumnsPerOut;
    auto const base = Base::to_underlying_arguments(of_weight, args, workspace);
    typename Base::Arguments local_args = args;
    Element const* const a = ptr_of_a(local_args);
    StrideOfA const& stride = stride_of_a(local_args);
    // Without a tensor to store to, A stands in for it: the descriptor has to be a legal one.
    bool const stores_a = args.ptr_A_out != nullptr;
    int32_t const rows = cute::get<kA>(problem);
    int32_t const k = cute::get<2>(problem);
    auto const store =
        make_tma_store_a(stores_a ? args.ptr_A_out : const_cast<Element*>(a), rows, k, 1, stride);
    auto local = tma_load_of<kA>(base);
    if (!args.input.local_rows.empty()) {
      auto local_problem = of_weight;
      cute::get<kA>(local_problem) = args.input.local_rows.size();
      ptr_of_a(local_args) = args.ptr_A_local;
      local = tma_load_of<kA>(Base::to_underlying_arguments(local_problem, local_args, workspace));
    }
    auto last_rows_a = *tma_load_of<kA>(base).get_tma_descriptor();
    if (kFitsLastRows && rows % kTileRows != 0) {
      bool const is_local = args.input.local_rows.contains({rows / kTileRows * kTileRows, rows});
      last_rows_a = last_rows_descriptor(is_local ? args.ptr_A_local : a,
                                         is_local ? args.input.local_rows.size() : rows, k, stride,
                                         rows % kTileRows);
    }
    Params params{base,         {},         local,     store, last_rows_a,
                  stores_a,     args.input, args.push, 1,     args.block_scales,
                  args.sums_out};
    if constexpr (kIsGated) {
      int32_t const columns = cute::get<kB>(of_weight);
      params.gate = Halves::descriptor(args.ptr_B, columns, k, args.dB);
      params.up = Halves::descriptor(args.ptr_B_up, columns, k, Halves::stride(args.ldb_up));
    }
    return params;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    cute::prefetch_tma_descriptor(params.tma_load_a_local.get_tma_descriptor());
    if constexpr (kFitsLastRows) cute::prefetch_tma_descriptor(&params.last_rows_a);
    if constexpr (kIsGated) {
      cute::prefetch_tma_descriptor(&params.gate);
      cute::prefetch_tma_descriptor(&params.up);
    }
  }

  /// All threads call it at the entry of a CTA with a tile. The warp that claims is the first of
  /// mma(), where CUTLASS counts the consumers' threads modulo their number.
  CUTLASS_DEVICE static void claim_first_item(Params const& params, TensorStorage& storage) {
    if constexpr (kConsumersPush) {
      if (params.push.shard != nullptr &&
          cutlass::canonical_warp_idx_sync() == kConsumers / cutlass::NumThreadsPerWarp) {
        wait_for_previous_kernel();
        agmm::claim_first_item(params.push, storage.first_item);
      }
    }
  }

  template <class FrgTensorC>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState smem_pipe_read,
                          FrgTensorC& accumulators, int k_tile_count, int thread_idx,
                          TensorStorage& shared_tensors, Params const& params) {
    if constexpr (kConsumersPush) {
      bool const is_first_tile = smem_pipe_read.count() == 0;
      if (is_first_tile && params.push.shard != nullptr) {
        copy_first_item<kReadsScales, kConsumers>(params.push, shared_tensors.first_item,
                                                  thread_idx);
      }
    }
    if constexpr (kScalesBlocks) {
      ScalesOfBlocks const scales(params.block_scales, shared_tensors.tile_starts,
                                  shared_tensors.scales, thread_idx);
      promoting_mma<Base>(pipeline, smem_pipe_read, accumulators, k_tile_count, thread_idx,
                          shared_tensors, scales);
    } else if constexpr (kAccumulation == Accumulation::Slow) {
      promoting_mma<Base>(pipeline, smem_pipe_read, accumulators, k_tile_count, thread_idx,
                          shared_tensors, NoScales{});
    } else {
      Base::mma(pipeline, smem_pipe_read, accumulators, k_tile_count, thread_idx, shared_tensors,
                params);
    }
    if constexpr (kSplitsInCluster) {
      Base::mma_tail(pipeline, smem_pipe_read, k_tile_count);
      cute::warpgroup_fence_operand(accumulators);
      if (split_detail::ctas_in_cluster() == 1) return;
      constexpr int kFloats = cute::size(FrgTensorC{});
      static_assert(kFloats * kConsumers * sizeof(float) <= sizeof(typename Base::TensorStorage));
      // The producer wrote it before it told the consumers of the first k tile.
      TileStart const tile = shared_tensors.first_tile;
      store_splits_in_cluster<cute::size<1>(SumsLayout{}), cute::size<0>(SumsLayout{})>(
          static_cast<typename Base::TensorStorage*>(&shared_tensors), kStoresA && params.stores_a,
          *reinterpret_cast<float (*)[kFloats]>(accumulators.data()), params.sums_out, tile.row,
          tile.column);
    }
  }

  CUTLASS_DEVICE void mma_tail(MainloopPipeline pipeline, PipelineState smem_pipe_release,
                               int k_tile_count) {
    if constexpr (!kSplitsInCluster) Base::mma_tail(pipeline, smem_pipe_release, k_tile_count);
  }

  /// The warp that loads calls it. What comes before reads the kernel's parameters, no more.
  template <class ProblemShape_MNKL>
  CUTLASS_DEVICE auto load_init(ProblemShape_MNKL const& problem, Params const& params) {
    wait_for_previous_kernel();
    params_ = &params;
    return Base::load_init(problem, params);
  }

  /// Where a tile lies in A.
  struct RowsOfA {
    int32_t tile;
    Range rows;
    bool is_local;      // read where the caller has them
    int32_t first_row;  // of A or of the local rows
  };
  CUTLASS_DEVICE static RowsOfA rows_of_a(AsyncInput const& input, int32_t own_tile) {
    // A CTA whose rows only pad the cluster takes those before: TMA fills what is out of bounds so
    // slowly that the whole cluster would wait for it. Its products are not stored.
    int32_t const rows = input.arrival.chunks.rows;
    int32_t const tile = min_of(own_tile, (rows - 1) / kTileRows);
    int32_t const begin = tile * kTileRows;
    // A tile that lies wholly in the local rows reads them there; every other tile reads gathered A
    // for all of its rows, so that one load is never split.
    Range const of_tile{begin, min_of(begin + kTileRows, rows)};
    bool const is_local = !input.local_rows.empty() && input.local_rows.contains(of_tile);
    return {tile, of_tile, is_local, begin - (is_local ? input.local_rows.begin : 0)};
  }
  /// The whole warp that loads calls it. `await_start()` returns when the stages may be used.
  template <class TensorA, class TensorB, class BlockCoord, class AwaitStart>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline,
                           PipelineState& smem_pipe_write,
                           cute::tuple<TensorA, TensorB> const& load_inputs,
                           BlockCoord const& blk_coord, int k_tile_begin, int k_tile_count,
                           AwaitStart const& await_start, uint32_t block_rank_in_cluster,
                           TensorStorage& shared_tensors) {
    using namespace cute;
    // Lane 0, which the pipeline counts on, issues.
    bool const issues = cute::elect_one_sync();

    Tensor sA = make_tensor(make_smem_ptr(smem_of<kA>(shared_tensors).data()),
                            SmemLayoutOfA{});  // (rows of A,BLK_K,PIPE)
    Tensor sB = make_tensor(make_smem_ptr(smem_of<kB>(shared_tensors).data()),
                            SmemLayoutOfB{});  // (columns of B,BLK_K,PIPE)

    constexpr uint32_t cluster_m = size<0>(ClusterShape{});
    uint32_t const cta_m = block_rank_in_cluster % cluster_m;
    uint32_t const cta_n = kSplitsInCluster ? 0 : block_rank_in_cluster / cluster_m;
    auto const& tma_load_a = tma_load_of<kA>(params);
    auto const& tma_load_b = tma_load_of<kB>(params);
    auto const cta_tma_a = tma_load_a.get_slice(kSwapped ? cta_m : cta_n);
    auto const cta_tma_b = tma_load_b.get_slice(kSwapped ? cta_n : cta_m);

    int const k_begin = kSplits ? k_tile_begin : 0;
    int const k_stop = kSplits ? k_begin + k_tile_count : params.input.k_tiles;
    AsyncInput const& input = params.input;
    int32_t const own_m_tile = get<kA>(blk_coord);
    RowsOfA const of_a = rows_of_a(input, own_m_tile);
    int32_t const own_n_tile = get<kB>(blk_coord);
    int32_t const n_tile = kSwapped && size<kB>(ClusterShape{}) > 1
                               ? min_of(own_n_tile, params.input.tiles_n.divisor - 1)
                               : own_n_tile;
    bool const is_partial = of_a.rows.size() < kTileRows;

    Tensor gA = domain_offset(make_coord(of_a.first_row, 0, 0),
                              get<kA>(load_inputs)(_, _, 0, _, 0));  // (rows of A,BLK_K,k)
    Tensor gB = get<kB>(load_inputs)(_, _, n_tile, _, 0);            // (columns of B,BLK_K,k)
    Tensor tAgA = cta_tma_a.partition_S(gA);
    Tensor tAsA = cta_tma_a.partition_D(sA);
    Tensor tBgB = cta_tma_b.partition_S(gB);
    Tensor tBsB = cta_tma_b.partition_D(sB);

    uint16_t const mcast_mask_a = multicast_mask<kA>(cta_m, cta_n);
    uint16_t const mcast_mask_b = multicast_mask<kB>(cta_m, cta_n);

    auto const load_a = [&](PipelineState const& stage, int k_tile) {
      stress_delay(input.arrival.wait_limit.rank);
      if constexpr (kFitsLastRows) {
        if (is_partial) {
          auto* const barrier = pipeline.producer_get_barrier(stage);
          CUTLASS_PRAGMA_UNROLL
          for (int column = 0; column < kTileK; column += kBoxColumns) {
            SM90_TMA_LOAD_2D::copy(&params.last_rows_a, barrier,
                                   static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL),
                                   smem_of<kA>(shared_tensors).begin() +
                                       stage.index() * kTileRows * kTileK + column * kTileRows,
                                   k_tile * kTileK + column, of_a.first_row);
          }
          // What the barrier expects of a whole tile.
          MainloopPipeline::FullBarrier::complete_transaction(
              barrier, block_rank_in_cluster,
              static_cast<uint32_t>((kTileRows - of_a.rows.size()) * kTileK * sizeof(Element)));
          return;
        }
      }
      TmaDescriptor const* const descriptor = of_a.is_local
                                                  ? params.tma_load_a_local.get_tma_descriptor()
                                                  : tma_load_a.get_tma_descriptor();
      copy(tma_load_a.with(descriptor, *pipeline.producer_get_barrier(stage), mcast_mask_a),
           tAgA(_, _, _, k_tile), tAsA(_, _, _, stage.index()));
    };
    auto const store_a = [&](int stage, int k_tile) {
      // &sA(0, 0, stage) would be wrong: where the buffer does not begin at a multiple of 1024
      // bytes, it swizzles the address of the first element, and TMA wants the buffer's.
      SM90_TMA_STORE_3D::copy(params.tma_store_a.get_tma_descriptor(),
                              smem_of<kA>(shared_tensors).begin() + stage * kTileRows * kTileK,
                              k_tile * kTileK,
                              of_a.first_row + (of_a.is_local ? input.local_rows.begin : 0), 0);
      tma_store_arrive();
    };
    StageStore<kStoresA, kStages, decltype(store_a)> a_store(
        params.stores_a && of_a.tile == own_m_tile, input.tiles_n, n_tile, k_begin, store_a);
    auto const acquire_and_load_b = [&](PipelineState const& stage, int k_tile) {
      if constexpr (kScalesBlocks) {
        if (k_tile == k_begin) {
          // The place is written once the consumers have read what the stage had, before they are
          // told of this tile.
          while (pipeline.producer_try_acquire(stage) != cutlass::BarrierStatus::WaitDone) {
          }
          shared_tensors.tile_starts[stage.index()] = {own_m_tile * kTileRows,
                                                       own_n_tile * kTileColumns};
        }
      }
      pipeline.producer_acquire(stage);
      bool const is_stored = a_store.before_refill(stage.index(), k_tile);
      if constexpr (kIsGated) {
        Halves::load(params, pipeline.producer_get_barrier(stage), mcast_mask_b, cta_m,
                     shared_tensors.smem_B.begin() + stage.index() * kTileColumns * kTileK, n_tile,
                     k_tile);
      } else {
        copy(tma_load_b.with(*pipeline.producer_get_barrier(stage), mcast_mask_b),
             tBgB(_, _, _, k_tile), tBsB(_, _, _, stage.index()));
      }
      if (is_stored) a_store.wait();
    };

    if constexpr (kSplitsInCluster) {
      if (issues) {
        shared_tensors.first_tile = {own_m_tile * kTileRows, own_n_tile * kTileColumns};
        asm volatile("" ::: "memory");  // CUTLASS's arrival at the stage clobbers nothing
      }
    }
    TileTimer<kTimed> const timer(input.tile_times,
                                  issues ? timed_tile_of(input, own_m_tile, n_tile) : -1);
    timer.begins();
    await_start();
    ChunkGate<kTileRows, kTileK, kSwapped> gate(input.arrival, shared_tensors.seen, of_a.first_row,
                                                {k_begin, k_stop}, of_a.is_local);
    if constexpr (kTimed) {
      // What the first look has found was not there when the tile began.
      if (smem_pipe_write.count() == 0 && gate.k_end() > k_begin) timer.found(true);
    }
    ProducerLoop<decltype(gate), decltype(acquire_and_load_b), decltype(load_a),
                 !kReadsScales> const loop{gate, acquire_and_load_b, load_a};
    loop(smem_pipe_write, k_begin, issues, [&](bool is_first) { timer.found(is_first); });
    if constexpr (kNoWait) gate.look_too_late();
    if (issues) {
      a_store.finish(smem_pipe_write, k_stop, [&](PipelineState const& stage) {
        // The phase in which the stage is full. Not consumer_wait(): this warp is no consumer.
        MainloopPipeline::FullBarrier::wait(pipeline.producer_get_barrier(stage), stage.phase());
      });
    }
    if constexpr (kSplitsInCluster && kStoresA) {
      __syncwarp();  // the lane that issues has awaited its stores
      if (params.stores_a) stages_are_stored();
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
  CUTLASS_DEVICE void load_auxiliary(Params const& params, TensorStorage& shared_tensors) {
    if constexpr (kMayPush) {
      if (params.push.shard != nullptr) {
        if constexpr (kConsumersPush) {
          push_head_after<kReadsScales, kConsumers>(shared_tensors.first_item, params.push,
                                                    params.input.arrival.wait_limit);
        } else {
          push_head<kReadsScales>(params.push, params.input.arrival.wait_limit);
        }
        finish(params);
      }
    }
    asm volatile("exit;");
    __builtin_unreachable();
  }

  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState smem_pipe_write) {
    // This waits until every load has landed. While the consumers go on with what is in the stages,
    // the buffers are given back, and the last warp awaits the copies of this rank's shard.
    PipelineState stage = smem_pipe_write;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < kStages; ++i, ++stage) {
      MainloopPipeline::FullBarrier::wait(pipeline.producer_get_barrier(stage), stage.phase());
    }
    finish(*params_);
    if (cute::elect_one_sync()) pipeline.producer_tail(smem_pipe_write);
  }

  /// The whole work of a CTA without a tile. Not inlined: it would lie before all that the others
  /// run.
  __device__ __noinline__ static void push_only(Params const& params, int32_t ctas_with_tiles,
                                                char* shared_memory) {
    wait_for_previous_kernel();
    auto& queue = *reinterpret_cast<PushCta::Queue*>(shared_memory);
    // The tail begins when most of the warps that push the head have found no more of it. Where
    // consumers claim the first items, only the warps of CTAs that got one go on.
    int32_t const head = params.push.order.head_count();
    int32_t const first_claims = kConsumersPush ? ctas_with_tiles : 0;
    int32_t const warps = kConsumersPush ? min_of(head, ctas_with_tiles) : ctas_with_tiles;
    int32_t const head_claims = max_of(head, first_claims) + warps * 3 / 4;
    if (push_tail<kReadsScales>(params.push, queue, head_claims, params.input.arrival.wait_limit)) {
      finish(params);
    }
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
  /// Columns of one TMA load: those of the swizzle.
  static constexpr int kBoxColumns = 128 / sizeof(Element);
  static_assert(!kStoresA || kTileK == kBoxColumns);

  /// Index of the tile in tile_times, or -1 when it is not recorded.
  CUTLASS_DEVICE static int timed_tile_of(AsyncInput const& input, int32_t tile_m, int32_t tile_n) {
    bool const recorded = kTimed && input.tile_times != nullptr && tile_n < input.tiles_n.divisor &&
                          tile_m * kTileRows < input.arrival.chunks.rows;
    return recorded ? tile_m * input.tiles_n.divisor + tile_n : -1;
  }

  /// The CTAs of the cluster that an operand's load is for.
  template <int kOperand>
  CUTLASS_DEVICE static uint16_t multicast_mask(uint32_t cta_m, uint32_t cta_n) {
    using namespace cute;
    using Copy =
        conditional_t<kOperand == 0, typename Base::GmemTiledCopyA, typename Base::GmemTiledCopyB>;
    uint16_t mask = 0;
    if constexpr (is_same_v<Copy, SM90_TMA_LOAD_MULTICAST>) {
      auto const layout = Layout<ClusterShape>{};
      for (int i = 0; i < size<1 - kOperand>(layout); ++i) {
        uint32_t const m = kOperand == 0 ? cta_m : i;
        uint32_t const n = kOperand == 0 ? i : cta_n;
        mask |= uint16_t(1) << layout(m, n, Int<0>{});
      }
    }
    return mask;
  }

  Params const* params_ = nullptr;
};

}  // namespace agmm
