// The one definition of the async-input kernels; generated translation units instantiate it for the
// rows of the kernel table.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "agmm/persistent_async_input_scheduler.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
// These replace gemm/collective/collective_builder.hpp and gemm/kernel/gemm_universal.hpp, which
// include every architecture.
#include "cutlass/gemm/collective/collective_builder_decl.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
// What the next two need comes first.
#include "cutlass/gemm/collective/builders/sm90_gmma_builder.inl"
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp"
#include "cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp"
#include "cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp"
#include "gemm/call_spec.hpp"
#include "gemm/kernel_entry.hpp"
#include "gemm/kernel_facts.hpp"
#include "gemm/sm90/async_input_mainloop.hpp"
#include "gemm/sm90/element_types.hpp"
#include "gemm/sm90/epilogue_policy.hpp"
#include "gemm/sm90/gated_epilogue.hpp"
#include "gemm/sm90/quick_start_kernel.hpp"
#include "gemm/sm90/wgmma.hpp"

namespace agmm {

/// The kernel, and beside it, where it may push, CTAs that do nothing else.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::MaxThreadsPerBlock, Kernel::MinBlocksPerMultiprocessor)
    async_input_kernel(CUTLASS_GRID_CONSTANT typename Kernel::Params const params) {
  extern __shared__ char shared_memory[];
  if constexpr (Kernel::CollectiveMainloop::kMayPush) {
    auto const tiles = static_cast<uint32_t>(params.scheduler.blocks_per_problem_);
    if (blockIdx.x + gridDim.x * blockIdx.y >= tiles) {
      Kernel::CollectiveMainloop::push_only(params.mainloop, int32_t(tiles), shared_memory);
      return;
    }
  }
  Kernel::CollectiveMainloop::claim_first_item(
      params.mainloop,
      reinterpret_cast<typename Kernel::SharedStorage*>(shared_memory)->tensors.mainloop);
  Kernel{}(params, shared_memory);
}

/// The epilogue with another number of buffers for what TMA is storing.
template <class Epilogue, int kBuffers>
struct WithStoreBuffers;

template <int kLoads, int kStores, int kFragment, bool kReuse, bool kDelay, class... Others,
          int kBuffers>
struct WithStoreBuffers<
    cutlass::epilogue::collective::CollectiveEpilogue<
        cutlass::epilogue::Sm90TmaWarpSpecialized<kLoads, kStores, kFragment, kReuse, kDelay>,
        Others...>,
    kBuffers> {
  using type = cutlass::epilogue::collective::CollectiveEpilogue<
      cutlass::epilogue::Sm90TmaWarpSpecialized<kLoads, kBuffers, kFragment, kReuse, kDelay>,
      Others...>;
};

/// The mainloop with another MMA.
template <class Mainloop, class Mma>
struct WithMma;

template <class Policy, class Tile, class A, class StrideA, class B, class StrideB, class UsualMma,
          class... Others, class Mma>
struct WithMma<cutlass::gemm::collective::CollectiveMma<Policy, Tile, A, StrideA, B, StrideB,
                                                        UsualMma, Others...>,
               Mma> {
  using type = cutlass::gemm::collective::CollectiveMma<Policy, Tile, A, StrideA, B, StrideB, Mma,
                                                        Others...>;
};

/// kLean: KernelEntry::lean.
template <class Element_, class LayoutB_, int TileM, int TileN, int TileK, int ClusterM,
          int ClusterN, Schedule kSchedule, bool kTimed = false, bool kSwapped = false,
          Accumulation kAccumulation = Accumulation::Fast, Epilogue kEpilogue = Epilogue::Bias,
          bool kLean = false>
struct KernelInstance {
  using Types = TypesOf<Element_>;
  using ElementA = typename Types::A;
  using ElementB = typename Types::B;
  using Element = typename Types::Out;
  using LayoutB = LayoutB_;

  // Sizes in CUTLASS's terms. A swapped kernel computes out^T = B^T A^T.
  static constexpr int kMmaM = kSwapped ? TileN : TileM;
  static constexpr int kMmaN = kSwapped ? TileM : TileN;
  static constexpr int kMmaClusterM = kSwapped ? ClusterN : ClusterM;
  static constexpr int kMmaClusterN = kSwapped ? ClusterM : ClusterN;
  using TileShape = cute::Shape<cute::Int<kMmaM>, cute::Int<kMmaN>, cute::Int<TileK>>;
  using ClusterShape = cute::Shape<cute::Int<kMmaClusterM>, cute::Int<kMmaClusterN>, cute::_1>;
  template <class Layout>
  using Transposed = cute::conditional_t<std::is_same_v<Layout, cutlass::layout::RowMajor>,
                                         cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  using FirstLayout = cute::conditional_t<kSwapped, Transposed<LayoutB>, cutlass::layout::RowMajor>;
  using SecondLayout = cute::conditional_t<kSwapped, cutlass::layout::ColumnMajor, LayoutB>;
  using OutLayout =
      cute::conditional_t<kSwapped, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;

  static constexpr bool kCooperative = kSchedule == Schedule::Cooperative;
  using MainloopSchedule =
      cute::conditional_t<kCooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                          cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  using EpilogueSchedule =
      cute::conditional_t<kCooperative, cutlass::epilogue::TmaWarpSpecializedCooperative,
                          cutlass::epilogue::TmaWarpSpecialized>;

  /// The mainloop's, by whose name CUTLASS tells accumulations apart. All but the fast one are
  /// AsyncInputMainloop's own, on the fast one's collective.
  using BuilderSchedule = cute::conditional_t<
      !Types::kIsFp8, MainloopSchedule,
      cute::conditional_t<kCooperative,
                          cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum,
                          cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum>>;
  static constexpr bool kPromotes = kAccumulation != Accumulation::Fast;
  static constexpr bool kScalesBlocks = is_block_scaled(kAccumulation);

  static constexpr int kAlignment = 16 / sizeof(ElementA);
  /// Block scales are the mainloop's.
  using Policy = EpiloguePolicy<kEpilogue, Element, Types::kIsFp8 && !kScalesBlocks>;
  using Stored = typename Policy::Stored;
  static constexpr int kOutAlignment = 16 / sizeof(Stored);
  /// Whether a tile has the sums of two weights, which GatedEpilogue makes results of.
  static constexpr bool kIsGated = Policy::kColumnsPerOut == 2;
  static_assert(!kIsGated || !kSwapped);
  static constexpr int kOutN = kMmaN / Policy::kColumnsPerOut;  // columns of out in a tile
  using OutTile = cute::Shape<cute::Int<kMmaM>, cute::Int<kOutN>, cute::Int<TileK>>;
  template <bool kRoundsOnly, class OfPolicy>
  struct TreeOf : RoundingTree<Stored> {};
  template <class OfPolicy>
  struct TreeOf<false, OfPolicy> : OfPolicy::template Tree<TileShape, kSwapped> {};
  using EpilogueTree = TreeOf<kIsGated, Policy>;

  // What is stored at a time: CUTLASS's 32 columns, or 16 where the width is no multiple of 32. Two
  // barriers each, which the other warpgroup of a pingpong kernel waits for when its own tile is
  // done; a cooperative kernel's end is bound by the memory.
  static constexpr int kStoreColumns = kCooperative && kOutN % 32 != 0 && kOutN % 48 == 0 ? 48
                                       : !kCooperative && kMmaM >= 128 && kOutN % 64 == 0 ? 64
                                                                                          : 0;
  using EpilogueTile =
      cute::conditional_t<kStoreColumns == 0, cutlass::epilogue::collective::EpilogueTileAuto,
                          cute::Shape<cute::Int<kCooperative ? 128 : 64>,
                                      cute::Int<kStoreColumns == 0 ? 16 : kStoreColumns>>>;
  template <class OfTree>
  using EpilogueWith = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, OutTile, ClusterShape, EpilogueTile,
      float, float, void, OutLayout, kOutAlignment, Stored, OutLayout, kOutAlignment,
      EpilogueSchedule, typename OfTree::type>::CollectiveOp;
  using UsualEpilogue = EpilogueWith<EpilogueTree>;

  static constexpr BLayout kBLayout =
      std::is_same_v<LayoutB, cutlass::layout::RowMajor> ? BLayout::RowMajor : BLayout::ColumnMajor;
  static constexpr auto kBMajor =
      kBLayout == BLayout::RowMajor ? cute::GMMA::Major::MN : cute::GMMA::Major::K;
  /// Promoted sums are in registers twice, those of an atom: no wider than 128 columns.
  static constexpr int kMmaColumns = wgmma_columns(kPromotes && kMmaN > 128 ? kMmaN / 2 : kMmaN);
  using FirstElement = cute::conditional_t<kSwapped, ElementB, ElementA>;
  using SecondElement = cute::conditional_t<kSwapped, ElementA, ElementB>;
  template <int kColumns>
  using MmaOf = decltype(cute::make_tiled_mma(
      Wgmma<FirstElement, SecondElement, kColumns, kSwapped ? kBMajor : cute::GMMA::Major::K,
            kSwapped ? cute::GMMA::Major::K : kBMajor>{},
      cute::Layout<cute::Shape<cute::Int<kCooperative ? 2 : 1>, cute::_1, cute::_1>>{}));
  using Mma = MmaOf<kMmaColumns>;
  /// At least what the mainloop keeps of block scales.
  static constexpr std::size_t kScalesBytes = kScalesBlocks ? 64 * TileM + 1024 : 0;
  /// CUTLASS's mainloop with as many stages as fit beside an epilogue.
  template <class Epilogue>
  using CutlassMainloop = typename WithMma<
      typename cutlass::gemm::collective::CollectiveBuilder<
          cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, FirstElement, FirstLayout,
          kAlignment, SecondElement, SecondLayout, kAlignment, float, TileShape, ClusterShape,
          cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
              sizeof(typename Epilogue::SharedStorage) + kScalesBytes)>,
          BuilderSchedule>::CollectiveOp,
      Mma>::type;

  static constexpr KernelFacts kFacts =
      facts_of({TileM, TileN, TileK, ClusterM, ClusterN, kSchedule, kTimed, kSwapped},
               kDType<Element_>, kBLayout, kAccumulation, kEpilogue);
  static constexpr bool kSplits = kFacts.can_split;
  static constexpr bool kSplitsInCluster = splits_in_cluster(kFacts.shape);
  using Mainloop = AsyncInputMainloop<CutlassMainloop<UsualEpilogue>, Policy, kSwapped, kTimed,
                                      kSplits, kFacts.can_store_a && !kLean, kAccumulation, !kLean>;
  template <class Epilogue>
  using KernelWith = QuickStartKernel<cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, Mainloop, Epilogue,
      cutlass::gemm::PersistentAsyncInputScheduler<
          MainloopSchedule, cutlass::gemm::AsyncInputWait::Mainloop,
          !kSplits           ? cutlass::gemm::SplitsK::No
          : kSplitsInCluster ? cutlass::gemm::SplitsK::InCluster
                             : cutlass::gemm::SplitsK::Yes,
          kSwapped ? cutlass::gemm::Gathered::B : cutlass::gemm::Gathered::A>>>;

  // The consumers wait for a buffer of the epilogue again and again while they have nothing to
  // multiply. So it gets as many as fit into what the stages of the mainloop leave.
  static constexpr int store_buffers() {
    constexpr int kSubtile = cute::size(typename UsualEpilogue::EpilogueTile{});
    constexpr int kLeft =
        cutlass::gemm::collective::detail::sm90_smem_capacity_bytes -
        static_cast<int>(sizeof(typename KernelWith<UsualEpilogue>::SharedStorage));
    constexpr int kUsual = UsualEpilogue::DispatchPolicy::StagesD;
    return std::min(kMmaM * kOutN / kSubtile,
                    kUsual + kLeft / (kSubtile * static_cast<int>(sizeof(Stored))));
  }
  using StoringEpilogue = typename WithStoreBuffers<UsualEpilogue, store_buffers()>::type;
  template <bool kBehindGate, class Storing>
  struct BehindGate {
    using type = GatedEpilogue<Storing, Policy, OutTile, MmaOf<wgmma_columns(kOutN)>>;
  };
  template <class Storing>
  struct BehindGate<false, Storing> {
    using type = Storing;
  };
  using CollectiveEpilogue = typename BehindGate<kIsGated, StoringEpilogue>::type;
  using GemmKernel = KernelWith<CollectiveEpilogue>;
  using Params = typename GemmKernel::Params;
  static_assert(GemmKernel::MaxThreadsPerBlock >= PushCta::kThreads);
  static_assert(GemmKernel::SharedStorageSize >= sizeof(PushCta::Queue));
  static_assert(GemmKernel::SharedStorageSize <=
                cutlass::gemm::collective::detail::sm90_smem_capacity_bytes);
  static_assert(alignof(Params) <= kParamsAlignment);

  static AsyncInput async_input(CallSpec const& call) {
    AsyncInputArgs const& mm = call.matmul;
    Arrival const& arrival = mm.arrival;
    AsyncInput input;
    ChunkGrid const chunks(mm.problem.m, mm.problem.k, arrival.chunks_m, arrival.chunks_k);
    input.arrival = {chunks,
                     arrival.signals,
                     arrival.ready_value,
                     ChunkArrival::bit_of_each(chunks),
                     {call.report_place, mm.limit_ns, arrival.senders, mm.rank}};
    input.local_rows = {mm.operands.local_begin, mm.operands.local_end};
    input.release = call.release;
    input.tile_times = mm.tile_times;
    input.tiles_n = FastDiv(ceil_div(mm.problem.n, TileN));
    input.k_tiles = ceil_div(mm.problem.k, TileK);
    input.starts_early = call.starts_early;
    return input;
  }

  static typename Mainloop::ScaleArgs block_scales(AsyncInputArgs const& mm) {
    Scales const& scales = mm.operands.scales;
    typename Mainloop::ScaleArgs args;
    static_cast<BlockScaleArgs&>(args) = {scales.a,
                                          scales.a_local,
                                          {mm.operands.local_begin, mm.operands.local_end},
                                          scales.a_out,
                                          scales.b,
                                          scales.b_k_stride,
                                          scales.b_n_stride,
                                          mm.problem.m,
                                          mm.problem.out_columns(),
                                          ceil_div(mm.problem.k, TileK)};
    if constexpr (kIsGated) args.b_up = scales.b_up;
    return args;
  }

  static SplitK split_k(AsyncInputArgs const& mm) {
    auto* const scratch = static_cast<char*>(mm.split_scratch);
    return {mm.config.splits, reinterpret_cast<float4*>(scratch + kSplitCounterBytes),
            reinterpret_cast<uint32_t*>(scratch)};
  }

  static char const* prepare(CallSpec const& call, void* params_memory) {
    using namespace cute;
    AsyncInputArgs const& mm = call.matmul;
    Operands const& operands = mm.operands;
    auto const [m, n, k] = std::tuple(mm.problem.m, mm.problem.n, mm.problem.k);
    int32_t const out_columns = mm.problem.out_columns();
    auto epilogue = epilogue_args<kEpilogue, Element>(operands.bias, operands.scales,
                                                      {operands.local_begin, operands.local_end});
    if constexpr (Policy::kHasOwn) epilogue.activation = mm.problem.activation;
    typename GemmKernel::Arguments gemm{};
    gemm.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    auto const* const a = static_cast<ElementA const*>(operands.a);
    auto const* const b = static_cast<ElementB const*>(operands.b);
    constexpr int kLeadingOfB = kBLayout == BLayout::RowMajor ? 1 : 0;
    if constexpr (kSwapped) {
      gemm.problem_shape = {n, m, k, 1};
      gemm.mainloop.ptr_A = b;
      get<kLeadingOfB>(gemm.mainloop.dA) = operands.ldb;
      gemm.mainloop.ptr_B = a;
      get<0>(gemm.mainloop.dB) = int64_t(k);
      get<1>(gemm.epilogue.dD) = int64_t(out_columns);
    } else {
      gemm.problem_shape = {m, n, k, 1};
      gemm.mainloop.ptr_A = a;
      get<0>(gemm.mainloop.dA) = int64_t(k);
      gemm.mainloop.ptr_B = b;
      get<kLeadingOfB>(gemm.mainloop.dB) = operands.ldb;
      get<0>(gemm.epilogue.dD) = int64_t(out_columns);
    }
    gemm.mainloop.ptr_A_local = static_cast<ElementA const*>(operands.a_local);
    gemm.mainloop.ptr_A_out = static_cast<ElementA*>(operands.a_out);
    gemm.mainloop.input = async_input(call);
    gemm.mainloop.push = call.push;
    if constexpr (kScalesBlocks) gemm.mainloop.block_scales = block_scales(mm);
    if constexpr (kSplitsInCluster) {
      gemm.mainloop.sums_out = {static_cast<Element*>(operands.out), m, n, out_columns, epilogue};
    }
    gemm.epilogue.ptr_D = static_cast<Stored*>(operands.out);
    if constexpr (kIsGated) {
      epilogue.bias_up = static_cast<Element const*>(operands.bias_up);
      if constexpr (Policy::kQuantizes) {
        epilogue.out_scales = operands.out_scales;
        epilogue.given_out_scale = operands.given_out_scale;
      }
      epilogue.column_scales_up = {operands.scales.b_up, operands.scales.b_per_column};
      gemm.epilogue.gate = epilogue;
      gemm.mainloop.ptr_B_up = operands.b_up;
      gemm.mainloop.ldb_up = operands.ldb_up;
    } else {
      gemm.epilogue.thread = EpilogueTree::arguments(epilogue);
    }
    gemm.hw_info.sm_count = min_of(mm.sm_count, FirstBlocks::kMostSms);
    gemm.scheduler.max_swizzle_size = mm.config.max_swizzle;
    using Options = typename GemmKernel::TileScheduler::RasterOrderOptions;
    gemm.scheduler.raster_order =
        mm.config.raster == Raster::AlongM ? Options::AlongM : Options::AlongN;
    if (!mm.config.across) {
      gemm.scheduler.rows_per_chunk = gemm.mainloop.input.arrival.chunks.rows_per_chunk.divisor;
      gemm.scheduler.chunk_pivot = mm.arrival.pivot;
    }
    gemm.scheduler.split_k = split_k(mm);

    if (!GemmKernel::can_implement(gemm)) return "CUTLASS cannot implement this problem";
    Params* const params =
        new (params_memory) Params(GemmKernel::to_underlying_arguments(gemm, nullptr));
    dim3 const ctas = grid(*params);
    auto const all = static_cast<int32_t>(ctas.x * ctas.y);
    auto const with_tiles = std::min(all, int32_t(params->scheduler.blocks_per_problem_));
    if (has_push_ctas(call.push) && with_tiles == all) {
      return "found a tile on every multiprocessor, wanted free ones for CTAs that push";
    }
    params->mainloop.finishing_warps =
        Mainloop::finishing_warps(call.push, with_tiles, all - with_tiles);
    // CUTLASS only prints when the driver refuses a TMA descriptor, and leaves it zeroed.
    auto const& of_mainloop = params->mainloop;
    bool refused = is_refused(
        {of_mainloop.tma_load_a.get_tma_descriptor(), of_mainloop.tma_load_b.get_tma_descriptor(),
         of_mainloop.tma_load_a_local.get_tma_descriptor(),
         of_mainloop.tma_store_a.get_tma_descriptor(), &of_mainloop.last_rows_a});
    if constexpr (kIsGated) refused = refused || is_refused({&of_mainloop.gate, &of_mainloop.up});
    return refused ? "the driver refused a TMA descriptor" : nullptr;
  }

  static bool is_refused(std::initializer_list<cute::TmaDescriptor const*> descriptors) {
    cute::TmaDescriptor const zero{};
    return std::any_of(descriptors.begin(), descriptors.end(), [&](auto const* descriptor) {
      return std::memcmp(descriptor, &zero, sizeof(zero)) == 0;
    });
  }

  static bool has_push_ctas(SmPushArgs const& push) {
    return push.shard != nullptr && push.order.tail_count() != 0;
  }

  /// The cluster of CTAs: CUTLASS's, or the splits of a tile.
  static dim3 cluster(Params const& params) {
    uint32_t const splits = kSplitsInCluster ? params.scheduler.split_k.splits : 1;
    return {kMmaClusterM, kMmaClusterN * splits, 1};
  }

  /// (kMmaClusterM, rest, 1), as CUTLASS's.
  static dim3 grid(Params const& params) {
    dim3 grid = GemmKernel::get_grid_shape(params);
    if (has_push_ctas(params.mainloop.push)) {
      dim3 const ctas = cluster(params);
      grid.y = params.hw_info.sm_count / (ctas.x * ctas.y) * ctas.y;
    }
    return grid;
  }

  static int setup() {
    return cudaFuncSetAttribute(reinterpret_cast<void const*>(async_input_kernel<GemmKernel>),
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                GemmKernel::SharedStorageSize);
  }

  // CUTLASS's launcher would set an attribute of the kernel at every cluster launch.
  //
  // Programmatic launch: CTAs may begin while the last ones of the kernel ahead in the stream end.
  // Invariant: every thread executes griddepcontrol.wait before its first access to memory that any
  // kernel writes or reads, and that returns when the kernel ahead has ended and its writes are
  // visible. It has to have waited for those ahead of it: every ordinary launch has, and one that
  // is programmatic itself by this instruction; where it leaves that out, so does the order. Before
  // it are the barriers in shared memory, prefetches of TMA descriptors, and reads of parameters,
  // which no kernel writes. The kernel never triggers the next one, whose CTAs would take the place
  // of kernels that this one may wait for. Where what is ahead is no kernel, an event's wait or a
  // copy, the attribute says nothing, in graphs too.
  static int launch(void* params, void* stream) {
    cudaLaunchAttribute attributes[2]{};
    unsigned count = 0;
    dim3 const ctas = KernelInstance::cluster(*static_cast<Params*>(params));
    if (ctas.x * ctas.y != 1) {
      cudaLaunchAttribute& cluster = attributes[count++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {ctas.x, ctas.y, ctas.z};
    }
    if (static_cast<Params*>(params)->mainloop.input.starts_early) {
      cudaLaunchAttribute& early = attributes[count++];
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid(*static_cast<Params*>(params));
    config.blockDim = GemmKernel::get_block_shape();
    config.dynamicSmemBytes = GemmKernel::SharedStorageSize;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = count;
    return cudaLaunchKernelExC(
        &config, reinterpret_cast<void const*>(async_input_kernel<GemmKernel>), &params);
  }

  static constexpr KernelVariant variant() { return {sizeof(Params), &prepare, &setup, &launch}; }

  static constexpr KernelEntry entry() {
    using Lean = KernelInstance<Element_, LayoutB_, TileM, TileN, TileK, ClusterM, ClusterN,
                                kSchedule, kTimed, kSwapped, kAccumulation, kEpilogue, true>;
    return {kFacts, variant(), Lean::variant()};
  }
};

}  // namespace agmm
