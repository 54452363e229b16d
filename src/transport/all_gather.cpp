#include "transport/all_gather.hpp"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "runtime/cuda.hpp"
#include "transport/stage.hpp"

namespace agmm {

namespace {

constexpr int kLeastSms = 2;  // for a cluster

// Room for the own shard, which peers read when they pull it: all shards of a slot are equally
// long.
std::size_t stage_bytes(std::size_t slot_bytes, int world_size) {
  return (slot_bytes / world_size + 127) / 128 * 128;
}

CUdeviceptr address(void const* p) { return reinterpret_cast<CUdeviceptr>(p); }

CUstreamBatchMemOpParams write_op(uint32_t* word, uint32_t value) {
  CUstreamBatchMemOpParams op{};
  op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  op.writeValue.address = address(word);
  op.writeValue.value = value;
  op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  return op;
}

CUstreamBatchMemOpParams wait_op(uint32_t* word, uint32_t value, unsigned flags) {
  CUstreamBatchMemOpParams op{};
  op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  op.waitValue.address = address(word);
  op.waitValue.value = value;
  op.waitValue.flags = flags;
  return op;
}

void batch(cudaStream_t stream, std::vector<CUstreamBatchMemOpParams>& ops) {
  if (ops.empty()) return;
  check_driver(
      driver().stream_batch_mem_op(stream, static_cast<unsigned>(ops.size()), ops.data(), 0),
      "cuStreamBatchMemOp");
}

void write(cudaStream_t stream, uint32_t* word, uint32_t value) {
  check_driver(
      driver().stream_write_value32(stream, address(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
      "cuStreamWriteValue32");
}

void copy(void* to, void const* from, std::size_t bytes, cudaStream_t stream) {
  if (bytes != 0)
    AGMM_CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}

}  // namespace

/// A stream of its own, since one that takes part in a capture can serve no other call meanwhile.
struct AllGather::Sequence {
  cudaStream_t copies = nullptr;
  cudaEvent_t fork = nullptr;
  cudaEvent_t staged = nullptr;
  cudaEvent_t copies_done = nullptr;
  cudaEvent_t call_done = nullptr;
  unsigned long long last_stream = 0;  // its id, of the last call

  Sequence() {
    int least = 0;
    int greatest = 0;
    AGMM_CHECK_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    AGMM_CHECK_CUDA(cudaStreamCreateWithPriority(&copies, cudaStreamNonBlocking, greatest));
    for (cudaEvent_t* event : {&fork, &staged, &copies_done, &call_done}) {
      AGMM_CHECK_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
  }
  ~Sequence() {
    // Destruction at exit may come after the driver is gone: errors mean nothing here.
    if (copies != nullptr) cudaStreamDestroy(copies);
    for (cudaEvent_t event : {fork, staged, copies_done, call_done}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    cudaGetLastError();
  }
  Sequence(Sequence const&) = delete;
  Sequence& operator=(Sequence const&) = delete;
};

struct AllGather::Handles {
  std::unique_ptr<Sequence> sequences[SlotRing::kSequences];  // those that there was a call of
  uint32_t** peer_words = nullptr;  // device, [kSlots][2][w]: this rank's credit and tag at peer p

  // Of the call entered.
  SlotRing::Capture capture = 0;
  unsigned long long stream = 0;  // its id
  int slot = 0;
  int sequence = 0;            // since its begin()
  bool copies_in_use = false;  // by it

  ~Handles() {
    if (peer_words != nullptr) cudaFree(peer_words);
    cudaGetLastError();
  }
};

std::size_t AllGather::workspace_bytes(std::size_t slot_bytes, int world_size) {
  return words_offset(slot_bytes, world_size) +
         kSlots * words_per_slot(world_size) * sizeof(uint32_t);
}

std::size_t AllGather::words_offset(std::size_t slot_bytes, int world_size) {
  return kSlots * (slot_bytes + stage_bytes(slot_bytes, world_size));
}

std::size_t AllGather::words_per_slot(int world_size) {
  std::size_t const words = std::size_t(world_size) * kCounters + kSingleWords;
  return (words + 31) / 32 * 32;  // the words of the slots share no cache line
}

std::size_t AllGather::first_credit_word(int slot, int world_size) {
  return slot * words_per_slot(world_size) + kCredits * static_cast<std::size_t>(world_size);
}

uint32_t* AllGather::words(int rank, int slot, Words kind) const {
  return reinterpret_cast<uint32_t*>(bases_[rank] + words_offset(slot_bytes_, world_size())) +
         slot * words_per_slot(world_size()) + kind * static_cast<std::size_t>(world_size());
}

char* AllGather::gather_buffer(int rank, int slot) const {
  return reinterpret_cast<char*>(bases_[rank]) + slot * slot_bytes_;
}

char* AllGather::staged_shard(int rank, int slot) const {
  return reinterpret_cast<char*>(bases_[rank]) + kSlots * slot_bytes_ +
         slot * stage_bytes(slot_bytes_, world_size());
}

bool has_peer_atomics(int device, int peer) {
  if (device == peer) return true;
  int found = 0;
  AGMM_CHECK_CUDA(
      cudaDeviceGetP2PAttribute(&found, cudaDevP2PAttrNativeAtomicSupported, device, peer));
  return found != 0;
}

AllGather::AllGather(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes,
                     int reserved_sms)
    : rank_(rank),
      bases_(bases),
      slot_bytes_(slot_bytes),
      device_(kernels_device().index),
      sm_count_(kernels_device().sm_count - reserved_sms) {
  if (reserved_sms < 0 || sm_count_ < kLeastSms) {
    throw std::invalid_argument("reserved_sms: found " + std::to_string(reserved_sms) +
                                ", wanted 0 to " +
                                std::to_string(kernels_device().sm_count - kLeastSms));
  }
  if (rank < 0 || rank >= world_size()) {
    throw std::invalid_argument("rank: found " + std::to_string(rank) + ", wanted 0 to " +
                                std::to_string(world_size() - 1));
  }
  if (slot_bytes % 128 != 0) {
    throw std::invalid_argument("slot_bytes: found " + std::to_string(slot_bytes) +
                                ", wanted a multiple of 128");
  }
  auto handles = std::make_unique<Handles>();
  handles->sequences[0] = std::make_unique<Sequence>();
  std::vector<uint32_t*> peer_words;
  for (int s = 0; s < kSlots; ++s) {
    for (int p = 0; p < world_size(); ++p) {
      peer_words.push_back(p == rank_ ? nullptr : words(p, s, kCredits) + rank_);
    }
    for (int p = 0; p < world_size(); ++p) peer_words.push_back(words(p, s, kTags) + rank_);
  }
  std::size_t const bytes = peer_words.size() * sizeof(uint32_t*);
  AGMM_CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&handles->peer_words), bytes));
  AGMM_CHECK_CUDA(
      cudaMemcpy(handles->peer_words, peer_words.data(), bytes, cudaMemcpyHostToDevice));
  AGMM_CHECK_CUDA(prepare_stage());
  driver();
  handles_ = handles.release();
}

AllGather::~AllGather() { delete handles_; }

namespace {

void refuse_sm_push(char const* name, int64_t found, std::string const& wanted) {
  throw std::invalid_argument("sm_push: found " + std::string(name) + "=" + std::to_string(found) +
                              ", wanted " + wanted);
}

void check(SmPush const& push, int64_t row_bytes) {
  if (push.parts < 1 || push.parts > kMaxPushParts || (push.parts & (push.parts - 1)) != 0) {
    refuse_sm_push("parts", push.parts, "a power of 2 up to " + std::to_string(kMaxPushParts));
  }
  if (push.chunks < 1 || push.chunks > kMaxColumnChunks) {
    refuse_sm_push("chunks", push.chunks, "1 to " + std::to_string(kMaxColumnChunks));
  }
  if (push.stretches < 1 || push.stretch_chunks < 0 ||
      int64_t(push.stretches) * push.stretch_chunks > push.chunks) {
    refuse_sm_push("stretches", push.stretches, "at least 1, of no more chunks than there are");
  }
  if (push.head_chunks < 0) refuse_sm_push("head_chunks", push.head_chunks, "at least 0");
  if (push.head_chunks != 0 && push.first_peers != 0) {
    refuse_sm_push("head_chunks", push.head_chunks, "0 with first peers");
  }
  if (push.chunk_bytes < 16 || push.chunk_bytes % 16 != 0) {
    refuse_sm_push("chunk_bytes", push.chunk_bytes, "a positive multiple of 16");
  }
  if (int64_t(push.chunks - 1) * push.chunk_bytes >= row_bytes ||
      int64_t(push.chunks) * push.chunk_bytes < row_bytes) {
    refuse_sm_push("chunks", push.chunks, "as many as it takes to cover a row");
  }
}

}  // namespace

Gathered AllGather::next(GatherRequest const& request) const {
  auto const bytes = static_cast<std::size_t>(world_size() * request.rows * request.row_bytes);
  if (bytes > slot_bytes_) {
    throw std::invalid_argument("A_shard: gathered it has " + std::to_string(bytes) +
                                " bytes, wanted at most the workspace's slot of " +
                                std::to_string(slot_bytes_));
  }
  if (request.transport == Transport::CopyEnginePull && request.a_out == nullptr) {
    throw std::invalid_argument("a_out: found null, wanted the gathered A for the pull transport");
  }

  int const s = handles_->slot;
  bool const is_pull = request.transport == Transport::CopyEnginePull;
  int column_chunks = 1;
  Gathered gathered;
  gathered.a = is_pull ? request.a_out : gather_buffer(rank_, s);
  gathered.signals = words(rank_, s, kSignals);
  gathered.tags = is_pull ? words(rank_, s, kTags) : nullptr;
  gathered.ready_value = request.tag;
  if (request.transport == Transport::SmPush) {
    if (world_size() > kMaxPushRanks) {
      refuse_sm_push("ranks", world_size(), "at most " + std::to_string(kMaxPushRanks));
    }
    check(request.sm_push, request.row_bytes);
    column_chunks = request.sm_push.chunks;
    gathered.count_bits = kCountBits;
    gathered.ready_value = tag_of_sum(request) + request.sm_push.parts;
    gathered.push = sm_push_args(request, s);
    gathered.counter_count = kConsumerCounters;
  }
  static_assert(kSignals == kTags + 1, "tags and signals are reset as one stretch");
  gathered.reset_words = words(rank_, s, kTags);
  gathered.reset_count = (1 + column_chunks) * world_size();
  gathered.counters = words(rank_, s, kCounters);
  gathered.peer_credits = handles_->peer_words + 2 * s * world_size();
  if (request.transport == Transport::CopyEnginePush && world_size() > 1) {
    gathered.sent = words(rank_, s, kCounters) + kSent;
  }
  return gathered;
}

void AllGather::take_credits(int s, Sequence const& sequence) {
  std::vector<CUstreamBatchMemOpParams> ops;
  uint32_t* const credits = words(rank_, s, kCredits);
  for (int i = 1; i < world_size(); ++i) {
    uint32_t* const credit = credits + (rank_ + world_size() - i) % world_size();
    ops.push_back(wait_op(credit, 1, CU_STREAM_WAIT_VALUE_EQ));
    ops.push_back(write_op(credit, 0));
  }
  batch(sequence.copies, ops);
}

StageArgs AllGather::stage_args(GatherRequest const& request, int s) const {
  ReportPlace const place = report_place();
  StageArgs args;
  args.rank = rank_;
  args.world_size = world_size();
  args.slot = s;
  args.finished_ctas = words(rank_, s, kCounters) + kStageCtas;
  args.tag = request.tag;
  args.own_signal = words(rank_, s, kSignals) + rank_;
  args.limit_ns = request.limit_ns;
  args.report = place.report;
  args.report_lock = place.report_lock;
  return args;
}

/// Push: the rows of the own slot that the consumer's boundary tiles read.
void AllGather::copy_boundary_rows(GatherRequest const& request, int s, void* stream) {
  std::size_t const own_offset = rank_ * request.rows * request.row_bytes;
  auto const* const shard = static_cast<char const*>(request.a_shard);
  StageArgs args = stage_args(request, s);
  int i = 0;
  for (Range const rows : {request.shared.head, request.shared.tail}) {
    std::size_t const begin = rows.begin * request.row_bytes;
    args.copies[i++] = {shard + (begin - own_offset), gather_buffer(rank_, s) + begin, nullptr,
                        static_cast<std::size_t>(rows.size() * request.row_bytes)};
  }
  AGMM_CHECK_CUDA(launch_stage(args, sm_count_, static_cast<cudaStream_t>(stream)));
}

/// Pull: the own shard, to where the peers read it and into the caller's A.
void AllGather::stage_own_shard(GatherRequest const& request, int s, Sequence const& sequence) {
  std::size_t const shard_bytes = request.rows * request.row_bytes;
  StageArgs args = stage_args(request, s);
  args.credits = words(rank_, s, kCredits);
  args.peer_tags = handles_->peer_words + (2 * s + 1) * world_size();
  args.copies[0] = {request.a_shard, staged_shard(rank_, s),
                    static_cast<char*>(request.a_out) + rank_ * shard_bytes, shard_bytes};
  AGMM_CHECK_CUDA(launch_stage(args, sm_count_, sequence.copies));
  AGMM_CHECK_CUDA(cudaEventRecord(sequence.staged, sequence.copies));
}

void AllGather::push(GatherRequest const& request, int s, Sequence const& sequence) {
  std::size_t const shard_bytes = request.rows * request.row_bytes;
  take_credits(s, sequence);
  // Nearest consumer first: r-1 computes this shard next after its own.
  for (int i = 1; i < world_size(); ++i) {
    int const peer = (rank_ + world_size() - i) % world_size();
    copy(gather_buffer(peer, s) + rank_ * shard_bytes, request.a_shard, shard_bytes,
         sequence.copies);
    uint32_t* const signal = words(peer, s, kSignals) + rank_;
    if (i + 1 < world_size()) {
      write(sequence.copies, signal, request.tag);
      continue;
    }
    std::vector<CUstreamBatchMemOpParams> ops{write_op(signal, request.tag),
                                              write_op(words(rank_, s, kCounters) + kSent, 1)};
    batch(sequence.copies, ops);
  }
}

/// What one part of a chunk adds to its signal beside the count.
uint32_t AllGather::tag_of_sum(GatherRequest const& request) {
  static_assert(kMaxPushParts < (1 << kCountBits), "the count must not reach the tag");
  return request.tag << kCountBits | 1u << kCountBits;  // not 0
}

PushOrder AllGather::push_order(GatherRequest const& request) const {
  SmPush const& push = request.sm_push;
  int const peers = std::max(world_size() - 1, 1);
  bool const two_rounds = 0 < push.first_peers && push.first_peers < peers;
  int64_t const chunk_bytes =
      request.rows * push.chunk_bytes * (two_rounds ? push.first_peers : peers);
  PushOrder order(push.chunks, push.stretches, push.stretch_chunks);
  while (1 << order.log_parts < push.parts) ++order.log_parts;
  auto const level_of = [&](int64_t most) {
    int32_t level = 0;
    while (level < order.log_parts && chunk_bytes >> (order.log_parts - level - 1) <= most) ++level;
    return level;
  };
  order.head_level = level_of(kHeadItemBytes);
  order.tail_level = level_of(kTailItemBytes);
  order.rounds = two_rounds ? 2 : 1;
  order.head_chunks = push.head_chunks == 0 ? push.chunks : std::min(push.head_chunks, push.chunks);
  return order;
}

SmPushArgs AllGather::sm_push_args(GatherRequest const& request, int s) const {
  constexpr int kVectorBytes = 16;
  SmPushArgs args;
  args.rank = rank_;
  args.world_size = world_size();
  args.slot = s;
  args.shard = request.a_shard;
  args.rows = static_cast<int32_t>(request.rows);
  args.row_vectors = static_cast<int32_t>(request.row_bytes / kVectorBytes);
  args.chunk_vectors = request.sm_push.chunk_bytes / kVectorBytes;
  args.order = push_order(request);
  args.first_peers = request.sm_push.first_peers;
  int64_t const sent = (world_size() - 1) * request.rows * request.row_bytes;
  args.consumers_copy = sent <= kConsumersCopyBytes;
  for (int p = 0; p < world_size(); ++p) {
    args.places[p] = {gather_buffer(p, s) + rank_ * request.rows * request.row_bytes,
                      words(p, s, kSignals) + rank_ * request.sm_push.chunks};
  }
  args.head = static_cast<int32_t>(request.shared.head.size());
  args.tail = static_cast<int32_t>(request.shared.tail.size());
  args.tag = tag_of_sum(request);
  args.credits = words(rank_, s, kCredits);
  args.claims = words(rank_, s, kCounters) + kClaims;
  args.tail_claims = words(rank_, s, kCounters) + kTailClaims;
  args.go = words(rank_, s, kCounters) + kGo;
  return args;
}

void AllGather::pull(GatherRequest const& request, int s, Sequence const& sequence) {
  std::size_t const shard_bytes = request.rows * request.row_bytes;
  auto* const out = static_cast<char*>(request.a_out);
  uint32_t* const signals = words(rank_, s, kSignals);
  // The signal of one peer's chunk and the wait for the next peer go in one batch.
  std::vector<CUstreamBatchMemOpParams> ops;
  for (int i = 1; i < world_size(); ++i) {
    int const peer = (rank_ + i) % world_size();
    // Any tag will do here: the consumer compares it, and ends the process if it is another call's.
    ops.push_back(wait_op(words(rank_, s, kTags) + peer, 1, CU_STREAM_WAIT_VALUE_GEQ));
    batch(sequence.copies, ops);
    copy(out + peer * shard_bytes, staged_shard(peer, s), shard_bytes, sequence.copies);
    ops.assign(1, write_op(signals + peer, request.tag));
  }
  batch(sequence.copies, ops);
}

int AllGather::slot() const { return handles_->slot; }
bool AllGather::is_captured() const { return handles_->capture != 0; }

void AllGather::enter(void* stream_handle) {
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  cudaStreamCaptureStatus status{};
  SlotRing::Capture id = 0;
  AGMM_CHECK_CUDA(cudaStreamGetCaptureInfo(stream, &status, &id));
  if (status == cudaStreamCaptureStatusInvalidated) {
    throw std::runtime_error("stream: found an invalid capture, wanted a valid one or none");
  }
  handles_->capture = status == cudaStreamCaptureStatusActive ? id : 0;
  // By id: another stream may get the handle of one that was destroyed.
  if (!is_captured()) AGMM_CHECK_CUDA(cudaStreamGetId(stream, &handles_->stream));
  if (ring_.is_broken(handles_->capture)) {
    throw std::runtime_error(
        is_captured()
            ? "workspace: an earlier call of this capture failed half-way; wanted another "
              "capture"
            : "workspace: an earlier call failed half-way, so its ranks may be out of "
              "step; wanted new processes");
  }
  handles_->slot = ring_.next_slot(handles_->capture);
}

void AllGather::begin(GatherRequest const& request, void* stream_handle) {
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  int const s = handles_->slot;
  bool const is_first = ring_.find(handles_->capture) == SlotRing::kNone;
  handles_->sequence = ring_.begin(handles_->capture);
  std::unique_ptr<Sequence>& place = handles_->sequences[handles_->sequence];
  if (place == nullptr) {
    RelaxedCapture const relaxed;
    place = std::make_unique<Sequence>();
  }
  Sequence& sequence = *place;
  // Calls of one workspace run one after the other also when they come on different streams.
  // Between eager calls and graph replays on different streams the caller has to order them, as
  // with NCCL.
  if (!is_first && (is_captured() || sequence.last_stream != handles_->stream)) {
    AGMM_CHECK_CUDA(cudaStreamWaitEvent(stream, sequence.call_done, 0));
  }
  handles_->copies_in_use = request.transport != Transport::SmPush;
  if (!handles_->copies_in_use) return;
  AGMM_CHECK_CUDA(cudaEventRecord(sequence.fork, stream));
  AGMM_CHECK_CUDA(cudaStreamWaitEvent(sequence.copies, sequence.fork, 0));
  if (request.transport == Transport::CopyEnginePush) {
    if (!request.shared.head.empty() || !request.shared.tail.empty()) {
      copy_boundary_rows(request, s, stream);
    }
    push(request, s, sequence);
  } else {
    stage_own_shard(request, s, sequence);
    AGMM_CHECK_CUDA(cudaStreamWaitEvent(stream, sequence.staged, 0));
    pull(request, s, sequence);
  }
  // Else the consumer ends after the copies: it awaits their signals, or their word that all is
  // sent. A capture wants the streams joined too.
  if (is_captured()) AGMM_CHECK_CUDA(cudaEventRecord(sequence.copies_done, sequence.copies));
}

void AllGather::end(void* stream_handle) {
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  Sequence& sequence = *handles_->sequences[handles_->sequence];
  if (handles_->copies_in_use && is_captured()) {
    AGMM_CHECK_CUDA(cudaStreamWaitEvent(stream, sequence.copies_done, 0));
  }
  AGMM_CHECK_CUDA(cudaEventRecord(sequence.call_done, stream));
  sequence.last_stream = handles_->stream;
  ring_.end(handles_->capture);
}

void AllGather::abandon(void* stream) noexcept {
  if (!is_captured()) return;
  // Not allowed in a capture, which ends it.
  cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
  cudaGetLastError();
}

}  // namespace agmm
