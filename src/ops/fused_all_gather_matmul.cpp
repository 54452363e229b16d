#include "agmm/fused_all_gather_matmul.hpp"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops/call_fields.hpp"
#include "runtime/cuda.hpp"
#include "sync/signals.hpp"

namespace agmm {

AGMM_FIELDS(FusedArgs, transport, push_parts, chunk_columns, first_peers, head_chunks, a_shard,
            a_out, rows, k, dtype, limit_ns, tile_times);
AGMM_FIELDS(Weight, b, ldb, b_layout, n, bias, out, config);

namespace {

constexpr int64_t kElementBytes = 2;
AsyncInputArgs matmul_of(Weight const& weight, FusedArgs const& args, int rank, int world_size) {
  AsyncInputArgs mm;
  mm.problem = {world_size * args.rows, weight.n, args.k, args.dtype, weight.b_layout};
  mm.config = weight.config;
  mm.a_local = args.a_shard;
  mm.local_begin = rank * args.rows;
  mm.local_end = mm.local_begin + args.rows;
  mm.b = weight.b;
  mm.ldb = weight.ldb;
  mm.bias = weight.bias;
  mm.out = weight.out;
  mm.chunks_m = world_size;
  mm.chunk_pivot = rank;
  mm.rank = rank;
  mm.mismatch_is_fatal = true;
  mm.limit_ns = args.limit_ns;
  return mm;
}

/// For the message to ranks whose calls differ.
std::string described(FusedArgs const& args, std::vector<Weight> const& weights) {
  std::string text = "all_gather_matmul(A_shard [" + std::to_string(args.rows) + ", " +
                     std::to_string(args.k) + "] " + to_string(args.dtype);
  for (Weight const& weight : weights) {
    text += ", B [" + std::to_string(args.k) + ", " + std::to_string(weight.n) + "] " +
            (weight.b_layout == BLayout::RowMajor ? "row-major" : "column-major");
  }
  return text + ", return_A " + (args.a_out == nullptr ? "False" : "True") + ")";
}

}  // namespace

FusedAllGatherMatmul::FusedAllGatherMatmul(int rank, std::vector<uintptr_t> const& bases,
                                           std::size_t slot_bytes, int reserved_sms)
    : gather_(rank, bases, slot_bytes, reserved_sms) {
  load_kernels();
  RelaxedCapture const relaxed;
  void* scratch = nullptr;
  AGMM_CHECK_CUDA(cudaMalloc(&scratch, max_split_scratch_bytes()));
  split_scratch_ = {scratch, [](void* memory) {
                      cudaFree(memory);
                      cudaGetLastError();
                    }};
  std::vector<char> const zeros(kSplitCounterBytes);
  AGMM_CHECK_CUDA(cudaMemcpy(scratch, zeros.data(), zeros.size(), cudaMemcpyHostToDevice));
}

FusedAllGatherMatmul::Call FusedAllGatherMatmul::prepare(FusedArgs const& args,
                                                         std::vector<Weight> const& weights) const {
  if (weights.empty()) throw std::invalid_argument("B: found no weight, wanted at least one");
  int const world_size = gather_.world_size();
  Range const own{gather_.rank() * args.rows, (gather_.rank() + 1) * args.rows};

  GatherRequest request;
  request.transport = args.transport;
  request.a_shard = args.a_shard;
  bool const is_pull = args.transport == Transport::CopyEnginePull;
  request.a_out = is_pull ? args.a_out : nullptr;
  request.rows = args.rows;
  request.row_bytes = args.k * kElementBytes;
  request.limit_ns = args.limit_ns;
  bool const is_sm_push = args.transport == Transport::SmPush;
  std::string call = args.dtype == DType::BFloat16 ? "bfloat16" : "float16";
  if (is_sm_push) {
    int const columns = std::max(args.chunk_columns, 1);
    int const chunks = ceil_div(args.k, columns);
    // As many chunks, as the grid cuts them.
    int const cut = ChunkGrid(1, args.k, 1, chunks).columns_per_chunk;
    request.sm_push = {args.push_parts, chunks, static_cast<int32_t>(cut * kElementBytes),
                       args.first_peers, args.head_chunks};
    KernelConfig const& config = weights[0].config;  // the other matmuls run when the push is over
    if (config.splits > 1) {
      int const tile_k = config.shape.tile_k;
      KParts const parts(ceil_div(args.k, tile_k), config.splits);
      request.sm_push.stretches = config.splits;
      request.sm_push.stretch_chunks = parts.stretch_chunks(tile_k, cut, chunks);
    }
    // Ranks that push in other parts must not take each other's sums for their own.
    call += " in " + std::to_string(args.push_parts) + "x" + std::to_string(chunks);
  }
  // 31 bits, not 0: the pull transport waits on its stream for "at least 1" as a signed number.
  request.tag = call_tag(args.rows, args.k, call, is_pull) & 0x7fffffffu;
  request.tag = std::max(request.tag, 1u);

  std::vector<AsyncInputArgs> matmuls;
  for (Weight const& weight : weights) {
    matmuls.push_back(matmul_of(weight, args, gather_.rank(), world_size));
    SharedRows const shared = shared_rows(own, weight.config.shape.tile_m, world_size * args.rows);
    request.shared.head = {own.begin, std::max(request.shared.head.end, shared.head.end)};
    request.shared.tail = {request.shared.tail.empty()
                               ? shared.tail.begin
                               : std::min(request.shared.tail.begin, shared.tail.begin),
                           own.end};
  }
  request.shared.tail.begin = std::max(request.shared.tail.begin, request.shared.head.end);

  Gathered const gathered = gather_.next(request);
  note_call(gathered.ready_value, described(args, weights));
  std::vector<PreparedMatmul> prepared;
  for (std::size_t i = 0; i < matmuls.size(); ++i) {
    AsyncInputArgs& mm = matmuls[i];
    mm.sm_count = gather_.sm_count();
    mm.split_scratch = split_scratch_.get();
    mm.a = gathered.a;
    mm.signals = gathered.signals;
    mm.tags = gathered.tags;
    mm.ready_value = gathered.ready_value;
    mm.count_bits = gathered.count_bits;
    if (is_sm_push) {
      mm.chunks_k = request.sm_push.chunks;
      mm.chunks_per_rank = mm.chunks_k;
      if (i == 0) mm.push = gathered.push;
    }
    if (i == 0) {
      mm.tile_times = args.tile_times;
      if (!is_pull) mm.a_out = args.a_out;
    }
    if (i + 1 == matmuls.size()) {
      mm.release_signals = gathered.reset_words;
      mm.release_count = gathered.reset_count;
      mm.counters = gathered.counters;
      mm.counter_count = gathered.counter_count;
      mm.peer_credits = gathered.peer_credits;
      mm.peer_count = world_size;
      mm.sent = gathered.sent;
    }
    prepared.push_back(prepare_async_input_mm(mm));
  }
  return {args, weights, gather_.slot(), request, std::move(prepared)};
}

FusedAllGatherMatmul::Call const& FusedAllGatherMatmul::find_or_prepare(
    FusedArgs const& args, std::vector<Weight> const& weights) {
  int const slot = gather_.slot();
  for (Call const& call : calls_) {
    if (call.slot == slot && same_fields(call.args, args) &&
        std::equal(call.weights.begin(), call.weights.end(), weights.begin(), weights.end(),
                   same_fields<Weight>)) {
      return call;
    }
  }
  if (calls_.size() < kKeptCalls) return calls_.emplace_back(prepare(args, weights));
  Call& call = calls_[oldest_];
  call = prepare(args, weights);
  oldest_ = (oldest_ + 1) % kKeptCalls;
  return call;
}

bool FusedAllGatherMatmul::operator()(FusedArgs const& args, std::vector<Weight> const& weights,
                                      void* stream) {
  std::lock_guard<std::mutex> const lock(gather_.mutex());
  DeviceGuard const device(gather_.device());
  gather_.enter(stream);
  Call const& call = find_or_prepare(args, weights);
  // Nothing is enqueued before here, and nothing short of a CUDA failure can stop the call now.
  try {
    gather_.begin(call.request, stream);
    for (PreparedMatmul const& mm : call.matmuls) mm.launch(stream);
    gather_.end(stream);
  } catch (...) {
    gather_.abandon(stream);
    throw;
  }
  return gather_.is_captured();
}

}  // namespace agmm
