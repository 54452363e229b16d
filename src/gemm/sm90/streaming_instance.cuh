// The host's side of the streaming kernels; generated translation units instantiate it for the rows
// of the kernel table whose schedule is streaming.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <new>

#include "cutlass/cuda_host_adapter.hpp"
#include "gemm/call_spec.hpp"
#include "gemm/kernel_entry.hpp"
#include "gemm/kernel_facts.hpp"
#include "gemm/sm90/element_types.hpp"
#include "gemm/sm90/streaming_kernel.hpp"

namespace agmm {

template <class Element_, class LayoutB, int TileM, int TileN, int TileK, int ClusterM,
          int ClusterN, Schedule kSchedule, Accumulation kAccumulation = Accumulation::Fast,
          Epilogue kEpilogue = Epilogue::Bias, int kMostWeights = 1, bool kSums = false>
struct StreamingInstance {
  static constexpr BLayout kBLayout =
      std::is_same_v<LayoutB, cutlass::layout::RowMajor> ? BLayout::RowMajor : BLayout::ColumnMajor;
  using Out = typename TypesOf<Element_>::Out;
  using Sink = std::conditional_t<kSums, SummedTiles<Out>, StoredTiles>;
  using Kernel = StreamingKernel<Element_, kBLayout, TileM, TileN, ClusterN, kAccumulation,
                                 kEpilogue, kMostWeights, Sink>;
  using Element = typename Kernel::Element;
  using Params = typename Kernel::Params;
  static_assert(kSchedule == Schedule::Streaming && TileK == kStreamedK && ClusterM == 1);
  static_assert(alignof(Params) <= kParamsAlignment);
  static constexpr KernelFacts kFacts =
      facts_of({TileM, TileN, TileK, ClusterM, ClusterN, kSchedule}, kDType<Element_>, kBLayout,
               kAccumulation, kEpilogue);

  /// The descriptor of boxes of a matrix whose rows are `row_elements` apart. Returns whether the
  /// driver takes it.
  static bool describe(CUtensorMap& map, void const* matrix, int32_t rows, int32_t columns,
                       int64_t row_elements, int32_t box_rows, CUtensorMapL2promotion promotion) {
    constexpr auto kType = Kernel::Types::kIsFp8                 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                           : kDType<Element_> == DType::BFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    cuuint64_t const shape[] = {cuuint64_t(columns), cuuint64_t(rows)};
    cuuint64_t const row_bytes[] = {cuuint64_t(row_elements) * sizeof(typename Kernel::ElementA)};
    cuuint32_t const box[] = {cuuint32_t(Kernel::kSlabColumns), cuuint32_t(box_rows)};
    cuuint32_t const steps[] = {1, 1};
    return CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
               &map, kType, 2, const_cast<void*>(matrix), shape, row_bytes, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  }

  static bool describe_weight(CUtensorMap& map, void const* b, int32_t n, int32_t k, int64_t ldb) {
    // The neighbours of what a box reads of a row of a column-major B are what the next one reads.
    return kBLayout == BLayout::ColumnMajor ? describe(map, b, n, k, ldb, Kernel::kOutColumns,
                                                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B)
                                            : describe(map, b, k, n, ldb, Kernel::kSlabColumns,
                                                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  }

  static bool describe_a(Params& params, Problem const& p, Operands const& operands) {
    constexpr auto kUsual = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    Range const local = params.local_rows;
    void const* const a_local = local.empty() ? operands.a : operands.a_local;
    int32_t const local_rows = local.empty() ? p.m : local.size();
    // Rows of a box beyond A would take time, and nobody reads them.
    int32_t const last_rows = p.m % TileM == 0 ? TileM : p.m % TileM;
    bool const is_last_local = local.contains({p.m - last_rows, p.m});
    return describe(params.a, operands.a, p.m, p.k, p.k, TileM, kUsual) &&
           describe(params.a_local, a_local, local_rows, p.k, p.k, TileM, kUsual) &&
           describe(params.last_rows, is_last_local ? a_local : operands.a,
                    is_last_local ? local_rows : p.m, p.k, p.k, last_rows, kUsual);
  }

  static BlockScaleArgs block_scales(AsyncInputArgs const& mm, Range const& local_rows,
                                     MoreWeight const& weight) {
    Scales const& scales = mm.operands.scales;
    return {scales.a,
            scales.a_local,
            local_rows,
            nullptr,
            weight.scales,
            weight.scale_k_stride,
            weight.scale_n_stride,
            mm.problem.m,
            weight.n,
            ceil_div(mm.problem.k, kStreamedK)};
  }

  /// The first weight of a call, as its others are described.
  static MoreWeight first_weight(AsyncInputArgs const& mm) {
    Operands const& operands = mm.operands;
    int32_t others = 0;
    for (int i = 0; i < operands.more_count; ++i) others += operands.more[i].n;
    Scales const& scales = operands.scales;
    return {operands.b,        operands.ldb,     mm.problem.out_columns() - others,
            operands.bias,     operands.out,     scales.b,
            scales.b_k_stride, scales.b_n_stride};
  }

  /// Fills in a weight of the launch whose columns begin at a block. Returns the block behind them,
  /// or -1 where the driver refuses a descriptor.
  static int64_t add_weight(typename Kernel::Weight& weight, int64_t first_block,
                            AsyncInputArgs const& mm, MoreWeight const& given,
                            Range const& local_rows) {
    weight.out = static_cast<Element*>(given.out);
    Scales scales = mm.operands.scales;
    scales.b = given.scales;
    scales.a_out = nullptr;
    weight.epilogue = epilogue_args<kEpilogue, Element>(given.bias, scales, local_rows);
    if constexpr (Kernel::Policy::kHasOwn) weight.epilogue.activation = mm.problem.activation;
    if constexpr (Kernel::kScalesBlocks) weight.block_scales = block_scales(mm, local_rows, given);
    weight.n = given.n;
    weight.first_block = int32_t(first_block);
    int32_t const k = mm.problem.k;
    if constexpr (Kernel::kIsPacked) {
      weight.map = static_cast<uint8_t const*>(given.b);
    } else if (!describe_weight(weight.map, given.b, given.n, k, given.ldb)) {
      return -1;
    }
    if constexpr (Kernel::kIsGated) {
      Operands const& operands = mm.operands;
      weight.epilogue.bias_up = static_cast<Element const*>(operands.bias_up);
      if (!describe_weight(weight.up, operands.b_up, given.n, k, operands.ldb_up)) return -1;
    }
    return first_block + ceil_div(given.n, Kernel::kOutColumns * ClusterN);
  }

  static char const* prepare(CallSpec const& call, void* params_memory) {
    AsyncInputArgs const& mm = call.matmul;
    Problem const& p = mm.problem;
    Operands const& operands = mm.operands;
    Arrival const& arrival = mm.arrival;
    if (call.push.shard != nullptr) return "found SM push, wanted a transport by copies";
    if (operands.more_count >= kMostWeights) return "found several weights, wanted one";
    Params& params = *new (params_memory) Params{};
    ChunkGrid const chunks(p.m, p.k, arrival.chunks_m, arrival.chunks_k);
    params.arrival = {chunks,
                      arrival.signals,
                      arrival.ready_value,
                      ChunkArrival::bit_of_each(chunks),
                      {call.report_place, mm.limit_ns, arrival.senders, mm.rank}};
    params.local_rows = {operands.local_begin, operands.local_end};
    params.release = call.release;
    params.m = p.m;
    params.k_tiles = ceil_div(p.k, kStreamedK);
    params.splits = FastDiv(mm.config.splits);
    params.tiles_m = FastDiv(ceil_div(p.m, TileM));
    params.weight_count = 1 + operands.more_count;
    int64_t blocks_n = 0;
    for (int i = 0; i < params.weight_count; ++i) {
      MoreWeight const given = i == 0 ? first_weight(mm) : operands.more[i - 1];
      blocks_n = add_weight(params.weights[i], blocks_n, mm, given, params.local_rows);
      if (blocks_n < 0) return kRefused;
    }
    auto& first = params.weights[0];
    if constexpr (Kernel::kScalesBlocks) {
      first.block_scales.a_out = operands.scales.a_out;
    } else {
      first.epilogue.row_scales.out = operands.scales.a_out;
    }
    if (blocks_n * params.tiles_m.divisor > INT32_MAX / 2) return "found too many tiles";
    params.blocks = int32_t(blocks_n) * params.tiles_m.divisor;
    // Clusters that may not lie side by side wait for room, so none is left out.
    int32_t const at_once = clusters_at_once(mm.sm_count, params.cluster_ctas());
    params.clusters = streaming_clusters(params.blocks, max_of(1, at_once));
    params.starts_early = call.starts_early || call.is_behind_gather;
    params.weight_is_ahead = call.weight_is_ahead || call.is_behind_gather;
    bool const awaits_peers = arrival.signals != nullptr || kSums || call.is_behind_gather;
    params.lets_next_start = call.weight_is_ahead && !awaits_peers;
    if constexpr (kSums) {
      if (!call.exchange.is_there()) return "found no ranks to sum over";
      StreamedExchange const& sum = call.exchange;
      params.sink = {sum.args,       static_cast<Element const*>(sum.residual),
                     sum.is_shared,  sum.is_scattered,
                     sum.owned_rows, sum.norm};
    }
    return describe_a(params, p, operands) ? nullptr : kRefused;
  }
  static constexpr char const* kRefused = "the driver refused a TMA descriptor";

  static int setup() {
    return cudaFuncSetAttribute(streaming_kernel<Kernel>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                int(sizeof(typename Kernel::Shared)));
  }

  static int launch(void* memory, void* stream) {
    Params const& params = *static_cast<Params const*>(memory);
    cudaLaunchAttribute attributes[2]{};
    unsigned count = 0;
    if (params.cluster_ctas() != 1) {
      cudaLaunchAttribute& cluster = attributes[count++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {unsigned(params.cluster_ctas()), 1, 1};
    }
    if (params.starts_early) {
      cudaLaunchAttribute& early = attributes[count++];
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(params.ctas()));
    config.blockDim = dim3(Kernel::kThreads);
    config.dynamicSmemBytes = sizeof(typename Kernel::Shared);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = count;
    return cudaLaunchKernelExC(&config, reinterpret_cast<void const*>(streaming_kernel<Kernel>),
                               &memory);
  }

  static constexpr KernelVariant variant() { return {sizeof(Params), &prepare, &setup, &launch}; }

  /// No streaming kernel pushes or stores A. `full` is the variant of calls with several weights,
  /// which a gate has not, nor a packed weight; `summing` is that of plain products of 16 bits.
  static constexpr KernelEntry entry() {
    constexpr int kMost =
        columns_per_out(kEpilogue) == 2 || Kernel::kIsPacked ? 1 : kMostStreamedWeights;
    constexpr bool kCanSum =
        kEpilogue == Epilogue::Bias && !Kernel::Types::kIsFp8 && !Kernel::kIsPacked;
    using Full = StreamingInstance<Element_, LayoutB, TileM, TileN, TileK, ClusterM, ClusterN,
                                   kSchedule, kAccumulation, kEpilogue, kMost>;
    KernelEntry found{kFacts, Full::variant(), variant()};
    if constexpr (kCanSum) {
      using Summing = StreamingInstance<Element_, LayoutB, TileM, TileN, TileK, ClusterM, ClusterN,
                                        kSchedule, kAccumulation, kEpilogue, 1, true>;
      found.summing = Summing::variant();
    }
    return found;
  }
};

}  // namespace agmm
