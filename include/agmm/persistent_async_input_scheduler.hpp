// cutlass::gemm::PersistentAsyncInputScheduler: the tile scheduler of a persistent GEMM whose A
// arrives chunk by chunk while the kernel runs.
//
// It is CUTLASS's persistent scheduler with another order of the tiles (agmm::TileOrder): the grid
// and the number of tiles are CUTLASS's, and so is what each CTA takes, one tile of every wave;
// only the place of a tile changes. It works with the cooperative and the pingpong warp-specialised
// kernels, which see an ordinary scheduler.
//
// A transposed product has the operand that arrives as its B (Gathered::B): then rows of N come in
// chunks, and what is said here about M holds for N.
//
// One problem, no batch: L has to be 1. (A place in the batch would be one more value that the
// warps keep, and the largest kernels have no register for it.)
//
// It is the fourth argument of GemmUniversal:
//   GemmUniversal<Shape<int,int,int,int>, CollectiveMainloop, CollectiveEpilogue,
//                 PersistentAsyncInputScheduler<KernelTmaWarpSpecializedPingpong>>
//
// AsyncInputWait says who waits for the signals:
//   Scheduler  the producer warp, when it fetches a tile, before any of its loads. This is for
//              CUTLASS's own collective mainloops.
//   Mainloop   agmm::AsyncInputMainloop, between the load of B and the load of A.
//
// SplitsK says whether several CTAs may compute a tile, each over a range of K (a split,
// agmm::SplitK), where there are fewer tiles than multiprocessors, and who adds up their sums:
//   No          nobody: one CTA computes a tile.
//   Yes         the scheduler's fixup(). This is for the cooperative kernel, whose clusters are one
//               tile wide, with agmm::AsyncInputMainloop.
//   ByEpilogue  the epilogue, which is called with the sum of each split.
//   InCluster   the mainloop, which stores the tile too (agmm::store_splits_in_cluster). The splits
//               of a tile are launched as a cluster.
//
// Order is agmm::TileOrder, or agmm::LaggedTileOrder, which takes the last chunk, the rank's own, a
// lag behind the others (Arguments::lag).
#pragma once

#include <cstdint>

#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "gemm/split_k.hpp"
#include "order/chunking.hpp"
#include "order/lagged_order.hpp"
#include "sync/device_wait.hpp"

namespace cutlass::gemm {

enum class AsyncInputWait { Scheduler, Mainloop };
enum class SplitsK { No, Yes, ByEpilogue, InCluster };
/// Which operand arrives in chunks of its rows.
enum class Gathered { A, B };

template <class KernelSchedule_, AsyncInputWait Wait_ = AsyncInputWait::Scheduler,
          SplitsK Splits_ = SplitsK::No, Gathered Gathered_ = Gathered::A,
          class Order_ = agmm::TileOrder>
struct PersistentAsyncInputScheduler {
  using KernelSchedule = KernelSchedule_;
  using Order = Order_;
  static constexpr AsyncInputWait Wait = Wait_;
  static constexpr SplitsK Splits = Splits_;
  static constexpr Gathered Operand = Gathered_;
};

namespace kernel::detail {

template <AsyncInputWait Wait, SplitsK Splits, Gathered Operand, class Order, int TileM, int TileN,
          int TileK, int ClusterM, int ClusterN>
class PersistentAsyncInputSchedulerSm90 : public PersistentTileSchedulerSm90 {
  using Base = PersistentTileSchedulerSm90;
  static constexpr bool kSplits = Splits != SplitsK::No;
  static constexpr bool kGathersB = Operand == Gathered::B;
  // The tile's size along the rows of the gathered operand, and along those of the other one.
  static constexpr int kTileRows = kGathersB ? TileN : TileM;
  static constexpr int kTileColumns = kGathersB ? TileM : TileN;
  static constexpr int kBlockRows = kTileRows * (kGathersB ? ClusterN : ClusterM);
  static constexpr int kBlockColumns = kTileColumns * (kGathersB ? ClusterM : ClusterN);
  static_assert(!kSplits || (ClusterN == 1 && Wait == AsyncInputWait::Mainloop));
  static_assert(Splits != SplitsK::InCluster || ClusterM == 1);

  struct SplitWork : Base::WorkTileInfo {
    int32_t split = 0;
    int32_t k_tile_begin = 0;
    int32_t k_tile_count = 0;
    // Whether this CTA has the sum of the whole tile, and is to store it. With SplitsK::Yes the
    // consumers alone know: an epilogue whose producer warp has something to load (a C) would have
    // to be told.
    bool is_whole = true;
  };

 public:
  using RasterOrder = typename Base::RasterOrder;
  using RasterOrderOptions = typename Base::RasterOrderOptions;
  using WorkTileInfo = cute::conditional_t<kSplits, SplitWork, typename Base::WorkTileInfo>;
  static constexpr bool IsDynamicPersistent = false;

  struct Arguments {
    int max_swizzle_size = 1;
    RasterOrderOptions raster_order = RasterOrderOptions::Heuristic;
    /// The rows of a chunk, as tiles of M (tiles_per_chunk_m) or, where a chunk is no multiple of a
    /// tile, as rows (rows_per_chunk, which wins when it is not 0). Where both are 0, A is one
    /// chunk.
    int tiles_per_chunk_m = 0;
    int rows_per_chunk = 0;
    /// The signals of the chunks: chunk i is ready when chunk_signals[i] == ready_value. Null: all
    /// of A is ready.
    uint32_t const* chunk_signals = nullptr;
    uint32_t ready_value = 1;
    /// The first tile of M to compute: after the swizzle, m becomes (m + pivot) % tiles_m. The
    /// chunk of that tile's first row is the pivot chunk.
    int tile_idx_pivot_m = 0;
    /// The pivot as a chunk; it wins over tile_idx_pivot_m when it is not negative.
    int chunk_pivot = -1;
    agmm::WaitLimit wait_limit{};
    /// The split of K. With SplitsK::Yes, tiles times splits are at most the CTAs of one wave.
    agmm::SplitK split_k{};
    /// The lag of the rank's own chunk; LaggedTileOrder alone reads it.
    agmm::Lag lag{};
  };

  struct Params : PersistentTileSchedulerSm90Params {
    Order order{};
    agmm::FirstBlocks first_blocks{};
    uint32_t const* chunk_signals = nullptr;
    uint32_t ready_value = 1;
    agmm::WaitLimit wait_limit{};
    agmm::SplitK split_k{};
    agmm::KSplits k_splits{};
    agmm::FastDiv splits{};
  };

  template <class ProblemShapeMNKL, class TileShape, class ClusterShape>
  static Params to_underlying_arguments(ProblemShapeMNKL problem, TileShape tile,
                                        ClusterShape cluster, KernelHardwareInfo const& hw_info,
                                        Arguments const& args, void* workspace = nullptr,
                                        uint32_t epilogue_subtile = 1,
                                        uint32_t ktile_start_alignment_count = 1u) {
    // The base counts clusters row by row, unswizzled; raster and swizzle are the permutation's.
    typename Base::Arguments base_args;
    base_args.max_swizzle_size = 1;
    base_args.raster_order = RasterOrderOptions::AlongN;
    Params params;
    static_cast<PersistentTileSchedulerSm90Params&>(params) =
        Base::to_underlying_arguments(problem, tile, cluster, hw_info, base_args, workspace,
                                      epilogue_subtile, ktile_start_alignment_count);

    CUTLASS_ASSERT(cute::size(cute::get<3>(problem)) == 1);
    int const rows = cute::size<kGathersB ? 1 : 0>(problem);
    int const columns = cute::size<kGathersB ? 0 : 1>(problem);
    int const k = cute::size<2>(problem);
    int rows_per_chunk =
        args.rows_per_chunk != 0 ? args.rows_per_chunk : args.tiles_per_chunk_m * kTileRows;
    if (rows_per_chunk <= 0 || rows_per_chunk > rows) rows_per_chunk = rows;
    agmm::ChunkGrid chunks(rows, k, agmm::ceil_div(rows, rows_per_chunk));
    chunks.rows_per_chunk = agmm::FastDiv(rows_per_chunk);
    int const pivot =
        args.chunk_pivot >= 0
            ? args.chunk_pivot
            : agmm::min_of(args.tile_idx_pivot_m * kTileRows, rows - 1) / rows_per_chunk;
    RasterOrder const raster = Params::get_rasterization_order(
        agmm::ceil_div(rows, kTileRows), agmm::ceil_div(columns, kTileColumns), args.raster_order);
    agmm::TileOrder const order(
        chunks, columns, kBlockRows, kBlockColumns, pivot, args.max_swizzle_size,
        raster == RasterOrder::AlongN ? agmm::Raster::AlongN : agmm::Raster::AlongM);
    if constexpr (cute::is_same_v<Order, agmm::LaggedTileOrder>) {
      params.order = Order(order, args.lag);
    } else {
      params.order = order;
    }
    params.first_blocks =
        agmm::FirstBlocks(params.order, 2 * (hw_info.sm_count / (ClusterM * ClusterN)));
    params.chunk_signals = args.chunk_signals;
    params.ready_value = args.ready_value;
    params.wait_limit = args.wait_limit;
    params.split_k = args.split_k;
    params.k_splits = agmm::KSplits(agmm::ceil_div(k, TileK), args.split_k.splits);
    params.splits = agmm::FastDiv(args.split_k.splits);
    params.blocks_per_problem_ *= args.split_k.splits;
    return params;
  }

  static bool can_implement(Arguments const& args) {
    return args.split_k.splits >= 1 && (kSplits || args.split_k.splits == 1) &&
           args.max_swizzle_size >= 0 && args.tiles_per_chunk_m >= 0 && args.rows_per_chunk >= 0 &&
           args.tile_idx_pivot_m >= 0;
  }

  CUTLASS_HOST_DEVICE PersistentAsyncInputSchedulerSm90() {}

  CUTLASS_DEVICE explicit PersistentAsyncInputSchedulerSm90(Params const& params)
      : Base(params), params_(&params) {}

  template <class ClusterShape>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) {
    return work_of([this](int32_t step) {
      // agmm's launcher starts at most FirstBlocks::kMost clusters.
      if (Wait == AsyncInputWait::Scheduler && step >= agmm::FirstBlocks::kMost) {
        return params_->order.block_at(step);
      }
      return params_->first_blocks.blocks[step];
    });
  }

  // The base counts its tiles in a 64-bit index, which is two registers too many next to 128
  // accumulators. Here the number of waves done is kept; the index follows from it.
  CUTLASS_DEVICE void advance_to_next_work(uint32_t advance_count = 1) { waves_ += advance_count; }

  CUTLASS_DEVICE bool is_last_tile(WorkTileInfo&, uint32_t advance_count = 1) const {
    return linear_index(waves_ + advance_count) >= Base::scheduler_params.blocks_per_problem_;
  }

  CUTLASS_DEVICE WorkTileInfo get_current_work() const {
    return work_of([this](int32_t step) { return params_->order.block_at(step); });
  }

  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }

  template <class TileSchedulerPipeline, class TileSchedulerPipelineState>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo work, TileSchedulerPipeline&,
                                      TileSchedulerPipelineState) {
    return fetch_next_work(work);
  }

  template <class ProblemShape, class Tile>
  CUTLASS_HOST_DEVICE static int get_work_k_tile_count(WorkTileInfo const& work,
                                                       ProblemShape problem, Tile tile) {
    if constexpr (kSplits) return work.k_tile_count;
    return Base::get_work_k_tile_count(work, problem, tile);
  }

  CUTLASS_HOST_DEVICE static uint32_t get_work_k_tile_start(WorkTileInfo const& work) {
    if constexpr (kSplits) return work.k_tile_begin;
    return 0;
  }

  CUTLASS_HOST_DEVICE static bool compute_epilogue(WorkTileInfo const& work, Params const&) {
    if constexpr (kSplits) return work.is_whole;
    return true;
  }

  template <class Accumulators>
  CUTLASS_DEVICE static void fixup(Params const& params, WorkTileInfo& work,
                                   Accumulators& accumulators, uint32_t, uint32_t) {
    if constexpr (Splits == SplitsK::Yes) {
      if (params.split_k.splits == 1) return;
      constexpr int kFloats = cute::size(Accumulators{});
      auto& sum = *reinterpret_cast<float (*)[kFloats]>(accumulators.data());
      int const cluster = int(blockIdx.y) / params.split_k.splits;
      work.is_whole = agmm::add_splits<ClusterM>(params.split_k, cluster, work.split, sum);
    }
  }

  template <class ProblemShape, class ElementAccumulator>
  static size_t get_workspace_size(Arguments const&, ProblemShape, KernelHardwareInfo const&,
                                   uint32_t, uint32_t = 1, uint32_t = 1) {
    return 0;
  }

  template <class ProblemShape, class ElementAccumulator>
  static cutlass::Status initialize_workspace(Arguments const&, void*, cudaStream_t, ProblemShape,
                                              KernelHardwareInfo const&, uint32_t, uint32_t = 1,
                                              uint32_t = 1, CudaHostAdapter* = nullptr) {
    return Status::kSuccess;
  }

  template <class ProblemShapeMNKL, class BlockShape, class ClusterShape>
  CUTLASS_HOST_DEVICE static dim3 get_grid_shape(Params const& params, ProblemShapeMNKL problem,
                                                 BlockShape tile, ClusterShape cluster,
                                                 KernelHardwareInfo hw_info, Arguments = {},
                                                 bool = true) {
    typename Base::Arguments base_args;
    base_args.raster_order = RasterOrderOptions::AlongN;
    if (params.split_k.splits > 1) {
      return dim3(ClusterM, uint32_t(params.blocks_per_problem_) / ClusterM, 1);
    }
    return Base::get_grid_shape(params, problem, tile, cluster, hw_info, base_args);
  }

  /// The tile of this CTA in a step of the order, which its cluster computes: for kernels that do
  /// not deal steps out to clusters, one of every wave, but hand them out in another way.
  CUTLASS_DEVICE WorkTileInfo work_at(int32_t step) const {
    WorkTileInfo work;
    work.is_valid_tile = true;
    set_step(work, step, [this](int32_t i) {
      bool const is_first = i < int32_t(gridDim.y) / ClusterN;
      return is_first ? params_->first_blocks.blocks[i] : params_->order.block_at(i);
    });
    return work;
  }

 private:
  template <class BlockAt>
  CUTLASS_DEVICE void set_step(WorkTileInfo& work, int32_t step, BlockAt const& block_at) const {
    if constexpr (kSplits) {
      // Neighbouring clusters of CTAs compute the splits of one cluster of tiles.
      int32_t const tiles = params_->splits.divide(step);
      work.split = step - tiles * params_->splits.divisor;
      agmm::Range const k_tiles = k_tiles_of(work.split);
      if constexpr (Splits == SplitsK::InCluster) work.is_whole = params_->splits.divisor == 1;
      work.k_tile_begin = k_tiles.begin;
      work.k_tile_count = k_tiles.size();
      step = tiles;
    }
    agmm::BlockCoord const block = block_at(step);
    work.M_idx = (kGathersB ? block.n : block.m) * ClusterM + blockIdx.x;
    work.N_idx = (kGathersB ? block.m : block.n) * ClusterN + blockIdx.y % ClusterN;
    work.L_idx = 0;
    if constexpr (Wait == AsyncInputWait::Scheduler) wait_for_chunks(work);
  }

  CUTLASS_DEVICE agmm::Range k_tiles_of(int32_t split) const {
    if constexpr (Splits == SplitsK::InCluster) {
      return params_->k_splits.even_split(split, params_->splits);
    } else {
      return params_->k_splits.split(split);
    }
  }

  // This does not use the base's arithmetic, which turns the cluster's index into a place that
  // would only be turned back. Every warp waits for this at the start, and the consumers before
  // each tile: with the base's arithmetic, and with the divisions that TileOrder's table saves, it
  // took 1700 cycles; and 800 where the first block is not looked up. The second warpgroup of a
  // pingpong kernel begins with the second wave.
  template <class BlockAt>
  CUTLASS_DEVICE WorkTileInfo work_of(BlockAt const& block_at) const {
    WorkTileInfo work;
    work.is_valid_tile = linear_index(waves_) < Base::scheduler_params.blocks_per_problem_;
    if (!work.is_valid_tile) return work;
    set_step(work, (blockIdx.y + gridDim.y * waves_) / ClusterN, block_at);
    return work;
  }

  /// Only the warp that issues the TMA loads (warp 0 of the CTA in both schedules) waits.
  CUTLASS_DEVICE void wait_for_chunks(WorkTileInfo const& work) const {
    if (params_->chunk_signals == nullptr || canonical_warp_idx_sync() != 0) return;
    int32_t const tile = kGathersB ? work.N_idx : work.M_idx;
    agmm::Range const touched =
        params_->order.chunks.row_chunks({tile * kTileRows, (tile + 1) * kTileRows});
    for (int chunk = touched.begin; chunk < touched.end; ++chunk) {
      agmm::wait_signal(params_->chunk_signals + chunk, params_->ready_value, chunk,
                        params_->wait_limit);
    }
    agmm::fence_proxy_async_global();
  }

  // The grid is (ClusterM, rest, 1): see get_grid_shape. gridDim.x is not read, since some kernels
  // have no register for it.
  CUTLASS_DEVICE static uint32_t linear_index(uint32_t waves) {
    return blockIdx.x + ClusterM * (blockIdx.y + gridDim.y * waves);
  }

  Params const* params_ = nullptr;
  uint32_t waves_ = 0;
};

template <class KernelSchedule, AsyncInputWait Wait, SplitsK Splits, Gathered Operand, class Order,
          class TileShape, class ClusterShape, uint32_t SchedulerPipelineStageCount>
struct TileSchedulerSelector<
    PersistentAsyncInputScheduler<KernelSchedule, Wait, Splits, Operand, Order>, arch::Sm90,
    TileShape, ClusterShape, SchedulerPipelineStageCount> {
  static_assert(cute::is_static_v<ClusterShape>, "the tile order needs a static cluster shape");
  using Scheduler = PersistentAsyncInputSchedulerSm90<
      Wait, Splits, Operand, Order, cute::size<0>(TileShape{}), cute::size<1>(TileShape{}),
      cute::size<2>(TileShape{}), cute::size<0>(ClusterShape{}), cute::size<1>(ClusterShape{})>;
};

}  // namespace kernel::detail
}  // namespace cutlass::gemm
