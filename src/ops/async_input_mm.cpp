#include "agmm/async_input_mm.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "gemm/kernel_entry.hpp"
#include "ops/call_fields.hpp"
#include "ops/launching.hpp"
#include "ops/prepare.hpp"
#include "ops/registry.hpp"
#include "order/clusters.hpp"
#include "order/streaming.hpp"
#include "runtime/cuda.hpp"

namespace agmm {

namespace {

/// The value of AGMM_EARLY_START. Python checks that it is one (_env.py).
std::string const& early_start() {
  static std::string const found = [] {
    char const* const value = std::getenv("AGMM_EARLY_START");
    return std::string(value == nullptr ? "" : value);
  }();
  return found;
}

KernelEntry const* find_kernel(AsyncInputArgs const& args, DeviceFacts const& device) {
  Problem const& problem = args.problem;
  return kernel_registry().find_matmul({device.architecture, Op::AllGatherMatmul, problem.dtype,
                                        problem.accumulation, problem.b_layout, problem.epilogue,
                                        args.config.shape});
}

/// Checks the CTAs that compute a tile together.
void check_parts(AsyncInputArgs const& args, DeviceFacts const& device) {
  Problem const& p = args.problem;
  KernelShape const& shape = args.config.shape;
  int32_t const splits = args.config.splits;
  int32_t const ctas =
      min_of(args.sm_count == 0 ? device.sm_count : args.sm_count, device.sm_count);
  if (is_streaming(shape)) {
    int32_t const most = min_of(kMaxStreamingCluster, ctas) / shape.cluster_n;
    if (splits > most) {
      refuse("config", std::to_string(splits) + " splits of " + shape.str(),
             "at most " + std::to_string(most) + ", whose CTAs are a cluster");
    }
    return;
  }
  // The scratch memory holds the partial sums of one wave and no more.
  Clusters const clusters(p, shape, ctas);
  if (splits * clusters.blocks() > clusters.at_once) {
    refuse("config", std::to_string(splits * clusters.blocks()) + " parts of clusters of tiles",
           "one wave of them, at most " + std::to_string(clusters.at_once));
  }
  if (!splits_in_cluster(shape)) {
    require_aligned("split_scratch", args.split_scratch);
  } else if (splits > kMaxClusterSplits) {
    refuse("config", std::to_string(splits) + " splits of " + shape.str(),
           "at most a cluster of " + std::to_string(kMaxClusterSplits));
  }
}

/// Checks the weights beside the first one.
void check_more_weights(AsyncInputArgs const& args) {
  Operands const& operands = args.operands;
  if (operands.more_count == 0) return;
  if (!is_streaming(args.config.shape) || columns_per_out(args.problem.epilogue) != 1) {
    refuse("config", args.config.shape.str() + " for several weights",
           "a streaming kernel without a gate");
  }
  if (operands.more_count >= kMostStreamedWeights) {
    refuse("B", std::to_string(1 + operands.more_count) + " weights",
           "at most " + std::to_string(kMostStreamedWeights));
  }
  int64_t columns = 0;
  for (int i = 0; i < operands.more_count; ++i) {
    MoreWeight const& weight = operands.more[i];
    require_multiple("B", "N", weight.n, kAlignment);
    require_multiple("B", "leading dimension", weight.ldb, alignment_of(args.problem.dtype));
    require_aligned("B", weight.b);
    require_aligned("out", weight.out);
    if (weight.bias != nullptr) require_aligned("bias", weight.bias);
    if (is_fp8(args.problem.dtype) && weight.scales == nullptr) {
      refuse("scale_b", "null", "device memory");
    }
    if (weight.n < 1) refuse("B", "N=" + std::to_string(weight.n), "at least 1");
    columns += weight.n;
  }
  if (columns >= args.problem.n) {
    refuse("B", "N=" + std::to_string(args.problem.n - columns), "at least 1");
  }
}

/// Checks the call and returns its kernel.
KernelEntry const& check(AsyncInputArgs const& args) {
  Problem const& p = args.problem;
  if (p.m < 1) refuse("A", "M=" + std::to_string(p.m), "at least 1");
  if (p.n < 1) refuse("B", "N=" + std::to_string(p.n), "at least 1");
  if (p.k < 1) refuse("A", "K=" + std::to_string(p.k), "at least 1");
  std::string const most = "at most " + std::to_string(kMaxSize);
  if (p.m > kMaxSize) refuse("A", "M=" + std::to_string(p.m), most);
  if (p.n > kMaxSize) refuse("B", "N=" + std::to_string(p.n), most);
  if (p.k > kMaxSize) refuse("A", "K=" + std::to_string(p.k), most);
  require_multiple("A", "K", p.k, alignment_of(p.dtype));
  int32_t const of_out = quantizes(p.epilogue) ? 2 * kAlignment : kAlignment;  // 16 bytes
  require_multiple("B", "N", p.n, of_out * columns_per_out(p.epilogue));
  Operands const& operands = args.operands;
  require_multiple("B", "leading dimension", operands.ldb, alignment_of(p.dtype));
  if (is_fp8(p.dtype)) {
    if (operands.scales.a == nullptr) refuse("scale_a", "null", "device memory");
    if (operands.scales.b == nullptr) refuse("scale_b", "null", "device memory");
    if (is_block_scaled(p.accumulation)) {
      // The kernels count the scales of A in 32 bits.
      int64_t const blocks = ceil_div(p.k, kScaleBlock);
      if (p.m * blocks > INT32_MAX) {
        refuse("scale_a", std::to_string(p.m * blocks) + " scales",
               "at most " + std::to_string(INT32_MAX));
      }
    }
  }
  require_aligned("A", operands.a);
  require_aligned("B", operands.b);
  require_aligned("out", operands.out);
  if (columns_per_out(p.epilogue) == 2) {
    require_multiple("up", "leading dimension", operands.ldb_up, alignment_of(p.dtype));
    require_aligned("up", operands.b_up);
    if (operands.bias_up != nullptr) require_aligned("bias_up", operands.bias_up);
    if (is_fp8(p.dtype) && operands.scales.b_up == nullptr) {
      refuse("scale_up", "null", "device memory");
    }
  }
  if (quantizes(p.epilogue) && operands.out_scales == nullptr) {
    refuse("scale_out", "null", "device memory");
  }
  check_more_weights(args);
  if (operands.local_end > operands.local_begin) require_aligned("A_shard", operands.a_local);
  if (operands.bias != nullptr) require_aligned("bias", operands.bias);
  if (operands.a_out != nullptr) require_aligned("A", operands.a_out);
  Arrival const& arrival = args.arrival;
  if (arrival.chunks_m < 1 || arrival.chunks_k < 1 ||
      !ChunkGrid(p.m, p.k, arrival.chunks_m, arrival.chunks_k).is_legal()) {
    refuse("a_chunk_signals",
           std::to_string(arrival.chunks_m) + "x" + std::to_string(arrival.chunks_k) + " chunks",
           "at least one row and column of A in each");
  }
  if (arrival.pivot < 0 || arrival.pivot >= arrival.chunks_m) {
    refuse("a_chunk_pivot", std::to_string(arrival.pivot),
           "0 to " + std::to_string(arrival.chunks_m - 1));
  }
  DeviceFacts const& device = kernels_device();
  KernelEntry const* const kernel = find_kernel(args, device);
  if (kernel == nullptr) {
    refuse("config", args.config.shape.str() + " for " + p.str(), "a kernel of this build");
  }
  KernelShape const& shape = args.config.shape;
  if (args.sm_count != 0 && args.sm_count < shape.cluster_m * shape.cluster_n) {
    refuse("sm_count", std::to_string(args.sm_count),
           "at least a cluster of " + std::to_string(shape.cluster_m * shape.cluster_n));
  }
  int32_t const splits = args.config.splits;
  if (splits != 1) {
    int32_t const k_tiles = ceil_div(p.k, args.config.shape.tile_k);
    if (splits < 1 || splits > k_tiles) {
      refuse("config",
             std::to_string(splits) + " splits of " + std::to_string(k_tiles) + " k tiles",
             "at least a k tile in each");
    }
    if (!kernel->facts.can_split) {
      refuse("config", std::to_string(splits) + " splits of " + args.config.shape.str(),
             "a kernel that can split K");
    }
    check_parts(args, device);
  }
  if (operands.a_out != nullptr && !kernel->facts.can_store_a) {
    refuse("config", args.config.shape.str() + " for " + p.str(), "a kernel that can store A");
  }
  return *kernel;
}

/// Says how many CTAs are launched, and in which order they take tiles.
void fit_to_clusters(AsyncInputArgs& args) {
  KernelShape const& shape = args.config.shape;
  ChunkGrid const chunks(args.problem.m, args.problem.k, args.arrival.chunks_m,
                         args.arrival.chunks_k);
  Clusters const clusters(args.problem, shape, args.sm_count);
  if (args.config.splits * clusters.blocks() <= clusters.at_once) args.config.across = true;
  args.sm_count =
      min_of(args.sm_count, clusters.to_launch(chunks) * shape.cluster_m * shape.cluster_n);
}

}  // namespace

std::size_t max_split_scratch_bytes() {
  return split_scratch_bytes(kernel_registry().matmuls(current_device().architecture));
}

void load_kernels() {
  DeviceFacts const& device = kernels_device();
  for (KernelEntry const* const kernel : kernel_registry().matmuls(device.architecture)) {
    make_ready(kernel->full, device);
    make_ready(kernel->lean, device);
    if (kernel->summing.setup != nullptr) make_ready(kernel->summing, device);
  }
}

PreparedMatmul prepare(CallSpec const& given) {
  KernelEntry const& entry = check(given.matmul);
  Operands const& operands = given.matmul.operands;
  bool const is_lean =
      given.push.shard == nullptr && operands.a_out == nullptr && operands.more_count == 0;
  bool const sums = given.exchange.is_there();
  if (sums && (!is_lean || entry.summing.prepare == nullptr)) {
    refuse("config", given.matmul.config.shape.str() + " with a sum over the ranks",
           "a streaming kernel of one weight of 16 bits, without an activation");
  }
  KernelVariant const& kernel = sums ? entry.summing : is_lean ? entry.lean : entry.full;
  CallSpec call = given;
  call.report_place = report_place(call.matmul.rank, call.matmul.arrival.senders.chunks_per_rank);
  AsyncInputArgs& args = call.matmul;
  DeviceFacts const& device = current_device();
  if (args.sm_count == 0) args.sm_count = device.sm_count;
  args.sm_count = min_of(args.sm_count, device.sm_count);
  if (!is_streaming(args.config.shape)) fit_to_clusters(args);

  make_ready(kernel, device);
  static KeptParams<CallSpec> kept;
  PreparedMatmul prepared;
  prepared.kernel_ = &kernel;
  prepared.params_ = kept.find_or_build(call, [&] {
    KernelParams memory = allocate_params(kernel.params_bytes);
    if (char const* reason = kernel.prepare(call, memory.get())) {
      throw std::invalid_argument(std::string("agmm: ") + args.config.shape.str() + " for " +
                                  args.problem.str() + ": " + reason);
    }
    return memory;
  });
  return prepared;
}

CallSpec call_of(AsyncInputArgs const& args) {
  CallSpec call;
  call.matmul = args;
  call.weight_is_ahead = early_start() == "weights" && !args.weight_is_new;
  call.starts_early = early_start() == "weights" || early_start() == "on";
  return call;
}

PreparedMatmul prepare_async_input_mm(AsyncInputArgs const& args) { return prepare(call_of(args)); }

void PreparedMatmul::launch(void* stream) const {
  check_cuda(static_cast<cudaError_t>(kernel_->launch(params_.get(), stream)), "kernel launch");
}

}  // namespace agmm
