// The host's side of the grouped matmuls; generated translation units instantiate it for the rows
// of the kernel table whose op is grouped_matmul.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <new>

#include "agmm/grouped_matmul.hpp"
#include "cutlass/cuda_host_adapter.hpp"
#include "gemm/grouped_entry.hpp"
#include "gemm/kernel_facts.hpp"
#include "gemm/sm90/element_types.hpp"
#include "gemm/sm90/grouped_kernel.hpp"

namespace agmm {

template <class Operands, class LayoutB, int TileM, int TileN, int TileK, int ClusterM,
          int ClusterN, Schedule kSchedule, Epilogue kEpilogue = Epilogue::Bias>
struct GroupedInstance {
  using Element = typename TypesOf<Operands>::A;
  using Out = typename TypesOf<Operands>::Out;
  static constexpr BLayout kBLayout =
      std::is_same_v<LayoutB, cutlass::layout::RowMajor> ? BLayout::RowMajor : BLayout::ColumnMajor;
  using Kernel = GroupedKernel<Operands, kBLayout, TileM, TileN, ClusterN, kSchedule, kEpilogue>;
  using Params = typename Kernel::Params;
  static_assert(kSchedule != Schedule::Streaming && TileK == Kernel::kTileK && ClusterM == 1);
  static_assert(alignof(Params) <= kParamsAlignment);

  static constexpr KernelFacts kFacts = [] {
    KernelFacts facts{};
    facts.shape = {TileM, TileN, TileK, ClusterM, ClusterN, kSchedule};
    facts.shape.swapped = true;
    facts.dtype = kDType<Operands>;
    facts.b_layout = kBLayout;
    facts.op = Op::GroupedMatmul;
    facts.epilogue = kEpilogue;
    if (Kernel::kIsScaled) facts.accumulation = Accumulation::Block;
    return facts;
  }();

  /// Sizes, and the elements between neighbours of all dimensions but the first.
  struct Tensor {
    void const* at;
    int dimensions;
    int64_t size[3];
    int64_t stride[2];
  };

  /// The descriptor of boxes of a tensor. Returns whether the driver takes it.
  static bool describe(CUtensorMap& map, Tensor const& tensor, int32_t box_along,
                       int32_t box_across) {
    constexpr auto kType = Kernel::kIsScaled                     ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                           : kDType<Operands> == DType::BFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    cuuint64_t shape[3], stride_bytes[2];
    for (int i = 0; i < 3; ++i) shape[i] = cuuint64_t(tensor.size[i]);
    for (int i = 0; i < 2; ++i) stride_bytes[i] = cuuint64_t(tensor.stride[i]) * sizeof(Element);
    cuuint32_t const box[] = {cuuint32_t(box_along), cuuint32_t(box_across), 1};
    cuuint32_t const steps[] = {1, 1, 1};
    return CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
               &map, kType, cuuint32_t(tensor.dimensions), const_cast<void*>(tensor.at), shape,
               stride_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  }

  static bool describe_operands(Params& params, GroupedMatmul const& args) {
    for (int i = 0; i < kTileQuarters; ++i) {
      Tensor const a{args.a, 2, {args.k, args.rows, 1}, {args.lda, 0}};
      int32_t const box_rows = (i + 1) * Kernel::kQuarterRows / Kernel::kClusterN;
      if (!describe(params.a[i], a, Kernel::kTileK, box_rows)) return false;
    }
    for (int i = 0; i < Kernel::kWeights; ++i) {
      ExpertWeight const& weight = i == 0 ? args.weight : args.up;
      constexpr bool kIsColumnMajor = kBLayout == BLayout::ColumnMajor;
      Tensor const b{weight.b,
                     3,
                     {kIsColumnMajor ? args.k : args.out_columns,
                      kIsColumnMajor ? args.out_columns : args.k, args.experts},
                     {weight.ldb, weight.expert_stride}};
      constexpr int kAcross = kIsColumnMajor ? Kernel::kOutColumns : Kernel::kTileK;
      if (!describe(params.weight[i], b, Kernel::kTileK, kAcross)) return false;
      params.bias[i] = static_cast<Out const*>(weight.bias);
      params.weight_scales[i] = weight.scales;
    }
    return true;
  }

  static char const* prepare(GroupedMatmul const& args, ReportPlace const& place,
                             void* params_memory) {
    Params& params = *new (params_memory) Params{};
    params.order = GroupedOrder(args.rows, args.experts, args.out_columns, TileM,
                                Kernel::kOutColumns * ClusterN);
    if (params.order.most_blocks(false) > INT32_MAX / 2) return "found too many tiles";
    params.offsets = args.offsets;
    params.arrival = args.arrival;
    Senders senders{};
    senders.chunks_per_rank = args.experts;
    params.wait_limit = {place, args.arrival.limit_ns, senders, args.arrival.rank};
    params.out = static_cast<Out*>(args.out);
    params.scales = args.scales;
    params.out_columns = args.out_columns;
    params.k_tiles = ceil_div(args.k, TileK);
    params.activation = args.activation;
    params.starts_early = args.starts_early;
    params.clears_rest = args.clears_rest;
    // CTAs without a tile help to clear the rows behind the last expert's.
    params.clusters = max_of(1, args.sm_count / ClusterN);
    if (!describe_operands(params, args)) return "the driver refused a TMA descriptor";
    return nullptr;
  }

  static int setup() {
    return cudaFuncSetAttribute(reinterpret_cast<void const*>(grouped_kernel<Kernel>),
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                int(sizeof(typename Kernel::Shared)));
  }

  static int launch(void* memory, void* stream) {
    Params const& params = *static_cast<Params const*>(memory);
    cudaLaunchAttribute attributes[2]{};
    unsigned count = 0;
    if (ClusterN > 1) {
      cudaLaunchAttribute& cluster = attributes[count++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {unsigned(ClusterN), 1, 1};
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
    return cudaLaunchKernelExC(&config, reinterpret_cast<void const*>(grouped_kernel<Kernel>),
                               &memory);
  }

  static constexpr GroupedEntry entry() {
    return {kFacts, sizeof(Params), &prepare, &setup, &launch};
  }
};

}  // namespace agmm
