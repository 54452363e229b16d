#include "agmm/grouped_matmul.hpp"

#include <stdexcept>
#include <string>

#include "gemm/grouped_entry.hpp"
#include "ops/fields.hpp"
#include "ops/launching.hpp"
#include "ops/prepare_grouped.hpp"
#include "ops/refuse.hpp"
#include "ops/registry.hpp"
#include "order/grouped_tiles.hpp"
#include "runtime/cuda.hpp"
#include "sync/wait_report.hpp"

namespace agmm {

namespace {

/// The most signals of a launch: the report of a wait has so many bits for one.
constexpr int64_t kMostRowSignals = int64_t(1) << LateWait::kChunkBits;

void check_weight(char const* name, ExpertWeight const& weight, int32_t row, DType dtype) {
  int32_t const alignment = alignment_of(dtype);
  require_aligned(name, weight.b);
  require_multiple(name, "leading dimension", weight.ldb, alignment);
  require_multiple(name, "stride of experts", weight.expert_stride, alignment);
  if (is_fp8(dtype)) {
    if (weight.scales.at == nullptr) refuse("scale_b", "null", "device memory");
    if (weight.scales.columns != 1 && weight.scales.columns != kScaleBlock) {
      refuse("scale_b", "scales of " + std::to_string(weight.scales.columns) + " columns",
             "of 1 or " + std::to_string(kScaleBlock));
    }
  }
  if (weight.expert_stride < 1) refuse(name, "a stride that is not positive", "a positive one");
  if (weight.ldb < row) {
    refuse(name, "a leading dimension of " + std::to_string(weight.ldb),
           "at least " + std::to_string(row));
  }
}

void check_size(char const* argument, char const* name, int32_t size) {
  if (size < 1 || size > kMaxSize) {
    refuse(argument, std::string(name) + "=" + std::to_string(size),
           "1 to " + std::to_string(kMaxSize));
  }
}

/// Checks the call and returns its kernel.
GroupedEntry const& check(GroupedMatmul const& args, DeviceFacts const& device) {
  check_size("rows", "rows", args.rows);
  check_size("weights", "N", args.out_columns);
  check_size("rows", "K", args.k);
  require_multiple("weights", "N", args.out_columns);
  require_multiple("rows", "K", args.k, alignment_of(args.dtype));
  require_multiple("rows", "leading dimension", args.lda, alignment_of(args.dtype));
  if (is_fp8(args.dtype) && args.scales.at == nullptr) refuse("scale_a", "null", "device memory");
  if (args.lda < args.k) {
    refuse("rows", "a leading dimension of " + std::to_string(args.lda),
           "at least K=" + std::to_string(args.k));
  }
  if (args.experts < 1 || args.experts > kMostExperts) {
    refuse("weights", std::to_string(args.experts) + " experts",
           "1 to " + std::to_string(kMostExperts));
  }
  require_aligned("rows", args.a);
  require_aligned("out", args.out);
  if (args.offsets == nullptr) refuse("offsets", "null", "device memory");
  int32_t const row = args.b_layout == BLayout::ColumnMajor ? args.k : args.out_columns;
  check_weight("weights", args.weight, row, args.dtype);
  if (args.epilogue == Epilogue::Gate) check_weight("weights", args.up, row, args.dtype);
  RowArrival const& arrival = args.arrival;
  if (arrival.arrived != nullptr) {
    if (arrival.begins == nullptr) refuse("begins", "null", "device memory");
    if (arrival.sources < 1 || arrival.first_source < 0 ||
        arrival.first_source >= arrival.sources) {
      refuse("arrival",
             "source " + std::to_string(arrival.first_source) + " of " +
                 std::to_string(arrival.sources),
             "one of at least 1");
    }
    if (int64_t(arrival.sources) * args.experts > kMostRowSignals) {
      refuse("arrival", std::to_string(int64_t(arrival.sources) * args.experts) + " signals",
             "at most " + std::to_string(kMostRowSignals));
    }
  }
  GroupedEntry const* const kernel =
      kernel_registry().find_grouped({device.architecture, Op::GroupedMatmul, args.dtype,
                                      is_fp8(args.dtype) ? Accumulation::Block : Accumulation::Fast,
                                      args.b_layout, args.epilogue, args.shape});
  if (kernel == nullptr) {
    refuse("config",
           args.shape.str() + " for " + to_string(args.dtype) + " B " + to_string(args.b_layout) +
               " " + to_string(args.epilogue),
           "a kernel of this build for grouped matmuls");
  }
  return *kernel;
}

/// Where a launch reports a wait for rows.
ReportPlace place_of(GroupedMatmul const& args) {
  if (args.arrival.arrived == nullptr) return {};
  return report_place(args.arrival.rank, args.experts);
}

/// A launch: no two with other fields share their parameters.
struct Launch {
  GroupedMatmul args{};
  int32_t device = 0;
};
AGMM_FIELDS(Launch, args, device);

}  // namespace

PreparedGrouped prepare_grouped(GroupedMatmul const& given) {
  DeviceFacts const& device = kernels_device();
  GroupedEntry const& kernel = check(given, device);
  Launch launch{given, device.index};
  GroupedMatmul& args = launch.args;
  if (args.sm_count <= 0 || args.sm_count > device.sm_count) args.sm_count = device.sm_count;
  {
    RelaxedCapture const relaxed;  // a kernel may be loaded at its first call
    make_ready(kernel, device);
  }
  static KeptParams<Launch> kept;
  KernelParams const params = kept.find_or_build(launch, [&] {
    KernelParams memory = allocate_params(kernel.params_bytes);
    if (char const* reason = kernel.prepare(args, place_of(args), memory.get())) {
      throw std::invalid_argument("agmm: " + args.shape.str() + " for " +
                                  std::to_string(args.rows) + "x" +
                                  std::to_string(args.out_columns) + "x" + std::to_string(args.k) +
                                  " of " + std::to_string(args.experts) + " experts: " + reason);
    }
    return memory;
  });
  return {params, kernel.launch};
}

void PreparedGrouped::launch(void* stream) const {
  check_cuda(static_cast<cudaError_t>(launcher(params.get(), stream)), "kernel launch");
}

void grouped_matmul(GroupedMatmul const& args, void* stream) {
  prepare_grouped(args).launch(stream);
}

}  // namespace agmm
