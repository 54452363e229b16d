#include "agmm/fused_all_gather_matmul.hpp"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gemm/kernel_facts.hpp"
#include "ops/call_fields.hpp"
#include "ops/launching.hpp"
#include "ops/prepare.hpp"
#include "runtime/cuda.hpp"
#include "sync/signals.hpp"
#include "transport/all_gather.hpp"

namespace agmm {

namespace {

/// A cached call: the results of all that comes before the first launch, which takes longer than a
/// launch.
struct Call {
  Gather gather;
  TileTimes* tile_times;
  std::vector<Weight> weights;
  int slot;
  GatherRequest request;
  Gathered gathered;
  std::vector<PreparedMatmul> matmuls;

  bool is_for(Gather const& other, std::vector<Weight> const& others, TileTimes const* times,
              int its_slot) const {
    return slot == its_slot && tile_times == times && same_fields(gather, other) &&
           std::equal(weights.begin(), weights.end(), others.begin(), others.end(),
                      same_fields<Weight>);
  }
};

/// Describes the call, for the message to ranks whose calls differ.
std::string described(Gather const& gather, std::vector<Weight> const& weights) {
  std::string text = is_fp8(gather.dtype) ? "all_gather_scaled_matmul" : "all_gather_matmul";
  text += "(A_shard [" + std::to_string(gather.rows) + ", " + std::to_string(gather.k) + "] " +
          to_string(gather.dtype);
  for (Weight const& weight : weights) {
    text += ", B [" + std::to_string(gather.k) + ", " + std::to_string(weight.n) + "] " +
            (weight.b_layout == BLayout::RowMajor ? "row-major" : "column-major");
    if (weight.epilogue != Epilogue::Bias) {
      text += std::string(" with ") + to_string(weight.epilogue) + " of " +
              to_string(weight.activation);
    }
  }
  return text + ", return_A " + (gather.a_out == nullptr ? "False" : "True") + ")";
}

/// Whether one launch of a streaming kernel can multiply both weights. Each product has the bits of
/// a launch of its own, since it has the same splits of K.
bool share_a_launch(Weight const& a, Weight const& b) {
  return is_streaming(a.config.shape) && same_fields(a.config, b.config) &&
         a.b_layout == b.b_layout && a.accumulation == b.accumulation &&
         a.scale_per_column == b.scale_per_column && a.epilogue == Epilogue::Bias &&
         b.epilogue == Epilogue::Bias;
}

/// How many weights from the i-th on one launch multiplies.
std::size_t launched_together(std::vector<Weight> const& weights, std::size_t i) {
  std::size_t count = 1;
  int64_t columns = weights[i].n;
  while (i + count < weights.size() && count < std::size_t(kMostStreamedWeights) &&
         share_a_launch(weights[i], weights[i + count]) &&
         columns + weights[i + count].n <= kMaxSize) {
    columns += weights[i + count++].n;
  }
  return count;
}

}  // namespace

struct FusedAllGatherMatmul::Impl {
  Impl(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes, int reserved_sms)
      : all_gather(rank, bases, slot_bytes, reserved_sms) {}

  Call prepare_call(Gather const& gather, std::vector<Weight> const& weights,
                    TileTimes* tile_times) const;
  Call const& find_or_prepare(Gather const& gather, std::vector<Weight> const& weights,
                              TileTimes* tile_times);

  // Loops come back with the same tensors: there is room for eight calls that take turns, each with
  // either slot. A call with new tensors is compared with all cached ones, so that more of them
  // would make it slower.
  static constexpr std::size_t kKeptCalls = 16;

  AllGather all_gather;
  // Configs that split K use this memory, one call at a time.
  SplitScratch split_scratch;
  std::vector<Call> calls;  // prepared last
  std::size_t oldest = 0;
};

std::size_t FusedAllGatherMatmul::workspace_bytes(std::size_t slot_bytes, int world_size) {
  return WorkspaceLayout(slot_bytes, world_size).bytes();
}

void FusedAllGatherMatmul::initialise_workspace(void* memory, std::size_t slot_bytes,
                                                int world_size, void* stream_handle) {
  WorkspaceLayout const layout(slot_bytes, world_size);
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  std::vector<uint32_t> words((layout.bytes() - layout.words_offset()) / sizeof(uint32_t));
  for (std::size_t const i : layout.credit_words()) words[i] = 1;
  AGMM_CHECK_CUDA(cudaMemcpyAsync(static_cast<char*>(memory) + layout.words_offset(), words.data(),
                                  words.size() * sizeof(uint32_t), cudaMemcpyHostToDevice, stream));
  AGMM_CHECK_CUDA(cudaStreamSynchronize(stream));
}

FusedAllGatherMatmul::FusedAllGatherMatmul(int rank, std::vector<uintptr_t> const& bases,
                                           std::size_t slot_bytes, int reserved_sms)
    : impl_(std::make_unique<Impl>(rank, bases, slot_bytes, reserved_sms)) {
  load_kernels();
  impl_->split_scratch = allocate_split_scratch(max_split_scratch_bytes());
}

FusedAllGatherMatmul::~FusedAllGatherMatmul() = default;

std::size_t FusedAllGatherMatmul::slot_bytes() const { return impl_->all_gather.slot_bytes(); }

Call FusedAllGatherMatmul::Impl::prepare_call(Gather const& gather,
                                              std::vector<Weight> const& weights,
                                              TileTimes* tile_times) const {
  if (is_fp8(gather.dtype) && gather.scales == nullptr) {
    throw std::invalid_argument("scale_a: found null, wanted device memory");
  }
  if (weights.empty()) throw std::invalid_argument("B: found no weight, wanted at least one");
  for (Weight const& weight : weights) {
    KernelFacts const facts =
        facts_of(weight.config.shape, gather.dtype, weight.b_layout, weight.accumulation);
    split_scratch.check(facts, weight.config.splits);
    int32_t const wanted =
        is_block_scaled(weight.accumulation) ? ceil_div(gather.k, kScaleBlock) : 1;
    if (gather.scale_columns != wanted) {
      throw std::invalid_argument("scale_a: found " + std::to_string(gather.scale_columns) +
                                  " for a row, wanted " + std::to_string(wanted) +
                                  " for the kind of scales of B");
    }
  }
  int32_t const most_rows = kMaxSize / all_gather.world_size();
  if (gather.rows < 0 || gather.rows > most_rows) {
    refuse("A_shard", std::to_string(gather.rows) + " rows",
           "at most " + std::to_string(most_rows) + " on each of " +
               std::to_string(all_gather.world_size()) + " ranks");
  }
  int32_t const all_rows = all_gather.world_size() * gather.rows;
  Range const own{all_gather.rank() * gather.rows, (all_gather.rank() + 1) * gather.rows};

  GatherRequest request;
  request.gather = gather;
  KernelConfig const& first = weights[0].config;  // the other matmuls run when the gather is over
  request.splits = first.splits;
  request.are_splits_even = splits_in_cluster(first.shape);
  request.tile_k = first.shape.tile_k;
  for (Weight const& weight : weights) {
    SharedRows const shared = shared_rows(own, weight.config.shape.tile_m, all_rows);
    request.shared.head = {own.begin, std::max(request.shared.head.end, shared.head.end)};
    request.shared.tail = {request.shared.tail.empty()
                               ? shared.tail.begin
                               : std::min(request.shared.tail.begin, shared.tail.begin),
                           own.end};
  }
  request.shared.tail.begin = std::max(request.shared.tail.begin, request.shared.head.end);

  Gathered const gathered = all_gather.next(request);
  note_call(gathered.arrival.ready_value, described(gather, weights));
  std::vector<PreparedMatmul> matmuls;
  for (std::size_t i = 0, count = 0; i < weights.size(); i += count) {
    count = launched_together(weights, i);
    Weight const& weight = weights[i];
    bool const is_first = i == 0;
    CallSpec call;
    AsyncInputArgs& mm = call.matmul;
    mm.problem = {all_rows,        weight.n,         gather.k,
                  gather.dtype,    weight.b_layout,  weight.accumulation,
                  weight.epilogue, weight.activation};
    mm.config = weight.config;
    mm.operands = {
        gathered.a, gather.a_shard, own.begin,   own.end,   is_first ? gathered.a_out : nullptr,
        weight.b,   weight.ldb,     weight.bias, weight.out};
    mm.operands.scales = {
        gathered.scales,         weight.scales,         true,
        weight.scale_per_column, gather.scales,         is_first ? gather.scales_out : nullptr,
        weight.scale_k_stride,   weight.scale_n_stride, weight.scales_up};
    mm.operands.b_up = weight.b_up;
    mm.operands.ldb_up = weight.ldb_up;
    mm.operands.bias_up = weight.bias_up;
    mm.operands.out_scales = weight.out_scales;
    mm.operands.given_out_scale = weight.given_out_scale;
    for (std::size_t j = 1; j < count; ++j) {
      Weight const& more = weights[i + j];
      mm.problem.n += more.n;
      mm.operands.more[mm.operands.more_count++] = {more.b,
                                                    more.ldb,
                                                    more.n,
                                                    more.bias,
                                                    more.out,
                                                    more.scales,
                                                    more.scale_k_stride,
                                                    more.scale_n_stride};
    }
    mm.arrival = gathered.arrival;
    mm.rank = all_gather.rank();
    mm.limit_ns = gather.limit_ns;
    mm.sm_count = all_gather.sm_count();
    mm.split_scratch = split_scratch.memory.get();
    if (is_first) {
      mm.tile_times = tile_times;
      call.push = gathered.push;
    }
    if (i + count == weights.size() && !is_fp8(gather.dtype)) call.release = gathered.release;
    matmuls.push_back(prepare(call));
  }
  return {gather, tile_times, weights, all_gather.slot(), request, gathered, std::move(matmuls)};
}

Call const& FusedAllGatherMatmul::Impl::find_or_prepare(Gather const& gather,
                                                        std::vector<Weight> const& weights,
                                                        TileTimes* tile_times) {
  for (Call const& call : calls) {
    if (call.is_for(gather, weights, tile_times, all_gather.slot())) return call;
  }
  if (calls.size() < kKeptCalls) {
    return calls.emplace_back(prepare_call(gather, weights, tile_times));
  }
  Call& call = calls[oldest];
  call = prepare_call(gather, weights, tile_times);
  oldest = (oldest + 1) % kKeptCalls;
  return call;
}

bool FusedAllGatherMatmul::operator()(Gather const& gather, std::vector<Weight> const& weights,
                                      void* stream, TileTimes* tile_times) {
  AllGather& all_gather = impl_->all_gather;
  std::lock_guard<std::mutex> const lock(all_gather.mutex());
  DeviceGuard const device(all_gather.device());
  all_gather.enter(stream);
  Call const& call = impl_->find_or_prepare(gather, weights, tile_times);
  // Nothing is enqueued before here, and nothing short of a CUDA failure can stop the call now.
  try {
    all_gather.begin(call.request, call.gathered, stream);
    for (PreparedMatmul const& mm : call.matmuls) mm.launch(stream);
    if (is_fp8(gather.dtype)) all_gather.release(call.gathered, stream);
    all_gather.end(stream);
  } catch (...) {
    all_gather.abandon();
    throw;
  }
  return all_gather.is_captured();
}

void FusedAllGatherMatmul::precede(void* stream) { impl_->all_gather.precede(stream); }

}  // namespace agmm
