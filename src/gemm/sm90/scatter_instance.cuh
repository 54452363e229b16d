// The one definition of the matmul + reduce-scatter kernels, and of the matmul + all-reduce ones;
// generated translation units instantiate it for the rows of their tables.
#pragma once

#include <cuda_runtime_api.h>

#include "agmm/persistent_async_input_scheduler.hpp"
#include "cutlass/cutlass.h"
#include "gemm/scatter_entry.hpp"
#include "gemm/scatter_spec.hpp"
#include "gemm/sm90/claiming_kernel.hpp"
#include "gemm/sm90/kernel_instance.cuh"
#include "gemm/sm90/lagged_mainloop.hpp"
#include "gemm/sm90/scatter_epilogue.hpp"
#include "gemm/sm90/scatter_mainloop.hpp"

namespace agmm {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::MaxThreadsPerBlock, Kernel::MinBlocksPerMultiprocessor)
    scatter_kernel(CUTLASS_GRID_CONSTANT typename Kernel::Params const params) {
  extern __shared__ char shared_memory[];
  Kernel{}(params, shared_memory);
}

/// kReturns: matmul + all-reduce.
template <class Element_, class LayoutB, int TileM, int TileN, int TileK, int ClusterM,
          int ClusterN, Schedule kSchedule, bool kTimed = false,
          Accumulation kAccumulation = Accumulation::Fast, bool kReturns = false,
          Epilogue kEpilogue = Epilogue::Bias>
struct ScatterInstance {
  using Plain = KernelInstance<Element_, LayoutB, TileM, TileN, TileK, ClusterM, ClusterN,
                               kSchedule, false, false, kAccumulation, kEpilogue>;
  using Element = typename Plain::Element;
  static constexpr bool kIsFp8 = TypesOf<Element_>::kIsFp8;
  static constexpr bool kCooperative = Plain::kCooperative;
  static constexpr KernelFacts kFacts = [] {
    KernelFacts facts = facts_of({TileM, TileN, TileK, ClusterM, ClusterN, kSchedule, kTimed},
                                 kDType<Element_>, Plain::kBLayout, kAccumulation, kEpilogue);
    // Sums of fp8 are scaled before they are added.
    facts.can_split = facts.can_split && !kIsFp8 && !kReturns;
    return facts;
  }();
  static constexpr bool kSplits = kFacts.can_split;
  static constexpr int kTileThreads = kCooperative ? 256 : 128;
  static constexpr int kTileBytes = TileM * TileN * int(sizeof(Element));
  // A cooperative kernel's consumers wait while their tile leaves, so it fits into the buffers as a
  // whole, at the price of a stage: on H200, with a link of 380 GB/s, 4096 x 8192 x 7168 takes 1.04
  // times torch.mm with 64 KB, 1.11 with 48 KB and a stage more, and 1.14 with 16 KB. In a pingpong
  // kernel another tile is computed meanwhile: 16 KB do, and leave a stage more than 48 KB.
  static constexpr int kPieceBytes = 8192;
  static constexpr int kBufferBytes = kCooperative ? kTileBytes : TileM == 64 ? 32768 : 16384;
  static_assert(kTileBytes % kPieceBytes == 0 && kBufferBytes % kPieceBytes == 0);
  static constexpr int kPieces = kTileBytes / kPieceBytes;
  static constexpr int kBuffers = kBufferBytes / kPieceBytes;

  using Policy = typename Plain::Policy;
  // CUTLASS's epilogue finishes sums that are scaled: those of fp8 products are it before they are
  // sent or added to. What is returned is finished before too: adding no bias, it rounds.
  using OwnPolicy = EpiloguePolicy<kReturns ? Epilogue::Bias : kEpilogue, Element, false>;
  using OwnTree = typename OwnPolicy::template Tree<typename Plain::TileShape, false>;
  using OwnEpilogue = typename Plain::template EpilogueWith<OwnTree>;
  using CollectiveEpilogue =
      ScatterEpilogue<OwnEpilogue, Policy, kTileThreads, kCooperative ? 1 : 2, kPieces, kBuffers,
                      ClusterM * ClusterN, kSplits, kTimed, kReturns>;
  using CutlassMainloop = typename Plain::template CutlassMainloop<CollectiveEpilogue>;
  using ScattersMainloop = ScatterMainloop<CutlassMainloop, kSplits, kTimed, kAccumulation>;
  using Mainloop =
      cute::conditional_t<kReturns,
                          LaggedMainloop<ScattersMainloop, typename CollectiveEpilogue::Push>,
                          ScattersMainloop>;
  static_assert(!kReturns || (!kIsFp8 && !kCooperative && ClusterM * ClusterN == 1),
                "every block of a lagged order is a tile, and only its own chunk's are returned");
  using GemmKernel = ClaimingKernel<cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, Mainloop, CollectiveEpilogue,
      cutlass::gemm::PersistentAsyncInputScheduler<
          typename Plain::MainloopSchedule, cutlass::gemm::AsyncInputWait::Mainloop,
          kSplits ? cutlass::gemm::SplitsK::ByEpilogue : cutlass::gemm::SplitsK::No,
          cutlass::gemm::Gathered::A, cute::conditional_t<kReturns, LaggedTileOrder, TileOrder>>>>;
  using Params = typename GemmKernel::Params;
  static_assert(GemmKernel::SharedStorageSize <=
                cutlass::gemm::collective::detail::sm90_smem_capacity_bytes);
  static_assert(alignof(Params) <= kParamsAlignment);
  static_assert(CollectiveEpilogue::Push::kTileBytes == kTileBytes);

  /// The order that the scheduler has.
  static TileOrder tile_order(ScatterSpec const& call) {
    ScatterTiles const& tiles = call.push.tiles;
    return TileOrder(ChunkGrid(tiles.padded_rows(), 1, tiles.world_size), call.n, TileM * ClusterM,
                     TileN * ClusterN, tiles.first_chunk(), call.config.max_swizzle,
                     call.config.raster);
  }

  static char const* prepare(ScatterSpec const& call, void* params_memory) {
    using namespace cute;
    ScatterTiles const& tiles = call.push.tiles;
    typename GemmKernel::Arguments gemm{};
    gemm.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    auto& mainloop = gemm.mainloop;
    mainloop.count = call.product_count;
    mainloop.rows = call.rows;
    mainloop.tiles = tiles;
    mainloop.times = call.tile_times;
    for (int i = 0; i < call.product_count; ++i) {
      agmm::Product const& product = call.products[i];
      auto& operands = mainloop.products[i].operands;
      operands.ptr_A = static_cast<typename Plain::ElementA const*>(product.a);
      get<0>(operands.dA) = product.lda;
      operands.ptr_B = static_cast<typename Plain::ElementB const*>(product.b);
      if constexpr (std::is_same_v<LayoutB, cutlass::layout::RowMajor>) {
        get<1>(operands.dB) = product.ldb;
      } else {
        get<0>(operands.dB) = product.ldb;
      }
      mainloop.products[i].k = product.k;
    }
    if constexpr (Mainloop::kScalesBlocks) {
      Scales const& scales = call.products[0].scales;
      BlockScaleArgs& args = mainloop.scales.block_scales;
      args.a = scales.a;
      args.b = scales.b;
      args.b_k = scales.b_k_stride;
      args.b_n = scales.b_n_stride;
      args.rows = call.rows;
      args.columns = call.n;
      args.k_tiles = ceil_div(call.products[0].k, TileK);
    }
    gemm.problem_shape = {tiles.padded_rows(), call.n, Mainloop::all_k_tiles(mainloop) * TileK, 1};
    gemm.epilogue.ptr_D = static_cast<Element*>(call.out);
    get<0>(gemm.epilogue.dD) = int64_t(call.out_columns());
    // The scales are those of the only product of fp8, or null.
    auto const epilogue = epilogue_args<kEpilogue, Element>(call.bias, call.products[0].scales, {});
    gemm.epilogue.fragment = {epilogue, call.rows, call.n};
    typename OwnPolicy::Args of_own{};
    if constexpr (!kReturns) of_own = epilogue;
    // Without a bias -0 is added, which keeps a sum of -0.
    gemm.epilogue.thread = OwnTree::arguments(of_own, Element(-0.0f));
    gemm.epilogue.push = call.push;
    gemm.epilogue.residual = static_cast<Element const*>(call.residual);
    auto* const scratch = static_cast<char*>(call.split_scratch);
    gemm.scheduler.split_k = {call.config.splits,
                              reinterpret_cast<float4*>(scratch + kSplitCounterBytes),
                              reinterpret_cast<uint32_t*>(scratch)};
    gemm.epilogue.split_k = gemm.scheduler.split_k;
    gemm.epilogue.times = call.tile_times;
    gemm.hw_info.sm_count = min_of(call.sm_count, FirstBlocks::kMostSms);
    gemm.scheduler.max_swizzle_size = call.config.max_swizzle;
    using Options = typename GemmKernel::TileScheduler::RasterOrderOptions;
    gemm.scheduler.raster_order =
        call.config.raster == Raster::AlongM ? Options::AlongM : Options::AlongN;
    gemm.scheduler.rows_per_chunk = tiles.padded.divisor;
    gemm.scheduler.chunk_pivot = tiles.first_chunk();
    if constexpr (kReturns) {
      gemm.scheduler.lag = call.lag;
      mainloop.push = call.push;
      mainloop.results = {
          LaggedTileOrder(tile_order(call), call.lag), static_cast<char*>(call.out_of_all),
          int64_t(call.out_columns()) * int64_t(sizeof(Element)), call.out_columns()};
    }
    if (!GemmKernel::can_implement(gemm)) return "CUTLASS cannot implement this problem";
    Params* const params =
        new (params_memory) Params(GemmKernel::to_underlying_arguments(gemm, nullptr));
    TmaDescriptor const zero{};
    auto const refused = [&](TmaDescriptor const* descriptor) {
      return std::memcmp(descriptor, &zero, sizeof(zero)) == 0;
    };
    auto const product_refused = [&](typename CutlassMainloop::Params const& product) {
      return refused(product.tma_load_a.get_tma_descriptor()) ||
             refused(product.tma_load_b.get_tma_descriptor());
    };
    bool any = product_refused(params->mainloop) ||
               refused(params->epilogue.tma_store_d.get_tma_descriptor());
    for (auto const& product : params->mainloop.others) any = any || product_refused(product);
    return any ? "the driver refused a TMA descriptor" : nullptr;
  }

  static int setup() {
    return cudaFuncSetAttribute(reinterpret_cast<void const*>(scatter_kernel<GemmKernel>),
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                GemmKernel::SharedStorageSize);
  }

  static int launch(void* params, void* stream) {
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {ClusterM, ClusterN, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = GemmKernel::get_grid_shape(*static_cast<Params*>(params));
    config.blockDim = GemmKernel::get_block_shape();
    config.dynamicSmemBytes = GemmKernel::SharedStorageSize;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &cluster;
    config.numAttrs = ClusterM * ClusterN == 1 ? 0 : 1;
    return cudaLaunchKernelExC(&config, reinterpret_cast<void const*>(scatter_kernel<GemmKernel>),
                               &params);
  }

  static constexpr ScatterEntry entry() {
    return {kFacts, sizeof(Params), kTileBytes, &prepare, &setup, &launch};
  }
};

}  // namespace agmm
