#include "agmm/all_gather.hpp"

#include <memory>
#include <stdexcept>
#include <string>

#include "runtime.hpp"

namespace agmm {

namespace {

// Signals, tags, credits: one word per rank each; then the counter of finished CTAs. Padded so that
// the words of the slots do not share a cache line.
std::size_t words_per_slot(int world_size) {
  return (3 * static_cast<std::size_t>(world_size) + 1 + 31) / 32 * 32;
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

struct AllGather::Handles {
  cudaStream_t copies = nullptr;
  cudaStream_t local = nullptr;
  cudaEvent_t fork = nullptr;
  cudaEvent_t credits_taken = nullptr;
  cudaEvent_t staged = nullptr;
  cudaEvent_t copies_done = nullptr;
  cudaEvent_t local_done = nullptr;
  cudaEvent_t call_done = nullptr;
  cudaEvent_t captured_call_done = nullptr;
  uint32_t** peer_credits = nullptr;  // device, [kSlots][w]

  bool local_used = false;
  bool any_call = false;  // eager
  unsigned long long last_capture = 0;
  unsigned long long capture = 0;  // of the call under way; 0: eager

  Handles() {
    int least = 0;
    int greatest = 0;
    AGMM_CHECK_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    for (cudaStream_t* stream : {&copies, &local}) {
      AGMM_CHECK_CUDA(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, greatest));
    }
    for (cudaEvent_t* event : {&fork, &credits_taken, &staged, &copies_done, &local_done,
                               &call_done, &captured_call_done}) {
      AGMM_CHECK_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
  }
  ~Handles() {
    // Destruction at exit may come after the driver is gone: errors mean nothing here.
    for (cudaStream_t stream : {copies, local}) {
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
    for (cudaEvent_t event :
         {fork, credits_taken, staged, copies_done, local_done, call_done, captured_call_done}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    if (peer_credits != nullptr) cudaFree(peer_credits);
    cudaGetLastError();
  }
};

std::size_t AllGather::workspace_bytes(std::size_t slot_bytes, int world_size) {
  return kSlots * (slot_bytes + words_per_slot(world_size) * sizeof(uint32_t));
}

std::size_t AllGather::first_credit_word(int slot, int world_size) {
  return slot * words_per_slot(world_size) + kCredits * static_cast<std::size_t>(world_size);
}

uint32_t* AllGather::words(int rank, int slot, Words kind) const {
  return reinterpret_cast<uint32_t*>(bases_[rank] + kSlots * slot_bytes_) +
         slot * words_per_slot(world_size()) + kind * static_cast<std::size_t>(world_size());
}

char* AllGather::slot(int rank, int slot) const {
  return reinterpret_cast<char*>(bases_[rank]) + slot * slot_bytes_;
}

AllGather::AllGather(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes)
    : rank_(rank), bases_(bases), slot_bytes_(slot_bytes), device_(current_device().index) {
  if (rank < 0 || rank >= world_size()) {
    throw std::invalid_argument("rank: found " + std::to_string(rank) + ", wanted 0 to " +
                                std::to_string(world_size() - 1));
  }
  if (slot_bytes % 128 != 0) {
    throw std::invalid_argument("slot_bytes: found " + std::to_string(slot_bytes) +
                                ", wanted a multiple of 128");
  }
  auto handles = std::make_unique<Handles>();
  std::vector<uint32_t*> credits;
  for (int s = 0; s < kSlots; ++s) {
    for (int p = 0; p < world_size(); ++p) {
      credits.push_back(p == rank_ ? nullptr : words(p, s, kCredits) + rank_);
    }
  }
  std::size_t const bytes = credits.size() * sizeof(uint32_t*);
  AGMM_CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&handles->peer_credits), bytes));
  AGMM_CHECK_CUDA(cudaMemcpy(handles->peer_credits, credits.data(), bytes, cudaMemcpyHostToDevice));
  driver();
  handles_ = handles.release();
}

AllGather::~AllGather() { delete handles_; }

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

  int const s = next_slot_;
  bool const is_push = request.transport == Transport::CopyEnginePush;
  Gathered gathered;
  gathered.a = is_push ? slot(rank_, s) : request.a_out;
  gathered.signals = words(rank_, s, kSignals);
  gathered.tags = is_push ? nullptr : words(rank_, s, kTags);
  gathered.ready_value = request.tag;
  static_assert(kTags == kSignals + 1, "signals and tags are reset as one stretch");
  gathered.reset_words = words(rank_, s, kSignals);
  gathered.reset_count = 2 * world_size();
  gathered.finished_ctas = words(rank_, s, kFinished);
  gathered.peer_credits = handles_->peer_credits + s * world_size();
  return gathered;
}

/// Calls of one workspace run one after the other also when they come on different streams. Between
/// eager calls and graph replays on different streams the caller has to order them, as with NCCL.
void AllGather::order_after_last_call(void* stream_handle) {
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  AGMM_CHECK_CUDA(cudaStreamGetCaptureInfo(stream, &status, &id));
  handles_->capture = status == cudaStreamCaptureStatusActive ? id : 0;
  if (handles_->capture == 0) {
    if (handles_->any_call) AGMM_CHECK_CUDA(cudaStreamWaitEvent(stream, handles_->call_done, 0));
  } else if (handles_->last_capture == id) {
    AGMM_CHECK_CUDA(cudaStreamWaitEvent(stream, handles_->captured_call_done, 0));
  }
}

void AllGather::take_credits(int s) {
  std::vector<CUstreamBatchMemOpParams> ops;
  uint32_t* const credits = words(rank_, s, kCredits);
  for (int i = 1; i < world_size(); ++i) {
    uint32_t* const credit = credits + (rank_ + world_size() - i) % world_size();
    ops.push_back(wait_op(credit, 1, CU_STREAM_WAIT_VALUE_EQ));
    ops.push_back(write_op(credit, 0));
  }
  batch(handles_->copies, ops);
}

/// The rows of the own slot that the consumer's boundary tiles read, and their signal.
void AllGather::copy_own_rows(GatherRequest const& request, int s) {
  std::size_t const own_offset = rank_ * request.rows * request.row_bytes;
  auto const* const shard = static_cast<char const*>(request.a_shard);
  AGMM_CHECK_CUDA(cudaEventRecord(handles_->credits_taken, handles_->copies));
  AGMM_CHECK_CUDA(cudaStreamWaitEvent(handles_->local, handles_->credits_taken, 0));
  for (Range const rows : {request.shared.head, request.shared.tail}) {
    std::size_t const begin = rows.begin * request.row_bytes;
    copy(slot(rank_, s) + begin, shard + (begin - own_offset), rows.size() * request.row_bytes,
         handles_->local);
  }
  write(handles_->local, words(rank_, s, kSignals) + rank_, request.tag);
  AGMM_CHECK_CUDA(cudaEventRecord(handles_->local_done, handles_->local));
}

void AllGather::push(GatherRequest const& request, int s) {
  std::size_t const shard_bytes = request.rows * request.row_bytes;
  take_credits(s);
  handles_->local_used = !request.shared.head.empty() || !request.shared.tail.empty();
  if (handles_->local_used) copy_own_rows(request, s);
  // Nearest consumer first: r-1 computes this shard next after its own.
  for (int i = 1; i < world_size(); ++i) {
    int const peer = (rank_ + world_size() - i) % world_size();
    copy(slot(peer, s) + rank_ * shard_bytes, request.a_shard, shard_bytes, handles_->copies);
    write(handles_->copies, words(peer, s, kSignals) + rank_, request.tag);
  }
}

void AllGather::pull(GatherRequest const& request, int s) {
  std::size_t const shard_bytes = request.rows * request.row_bytes;
  auto* const out = static_cast<char*>(request.a_out);
  uint32_t* const signals = words(rank_, s, kSignals);

  handles_->local_used = true;
  AGMM_CHECK_CUDA(cudaStreamWaitEvent(handles_->local, handles_->fork, 0));
  copy(out + rank_ * shard_bytes, request.a_shard, shard_bytes, handles_->local);
  write(handles_->local, signals + rank_, request.tag);

  take_credits(s);
  copy(slot(rank_, s) + rank_ * shard_bytes, request.a_shard, shard_bytes, handles_->copies);
  std::vector<CUstreamBatchMemOpParams> tags;
  for (int i = 0; i < world_size(); ++i) {
    int const peer = (rank_ + world_size() - i) % world_size();
    tags.push_back(write_op(words(peer, s, kTags) + rank_, request.tag));
  }
  batch(handles_->copies, tags);
  AGMM_CHECK_CUDA(cudaEventRecord(handles_->staged, handles_->copies));
  AGMM_CHECK_CUDA(cudaStreamWaitEvent(handles_->local, handles_->staged, 0));
  AGMM_CHECK_CUDA(cudaEventRecord(handles_->local_done, handles_->local));
  for (int i = 1; i < world_size(); ++i) {
    int const peer = (rank_ + i) % world_size();
    // Any tag will do here: the consumer compares it, and ends the process if it is another call's.
    std::vector<CUstreamBatchMemOpParams> staged{
        wait_op(words(rank_, s, kTags) + peer, 1, CU_STREAM_WAIT_VALUE_GEQ)};
    batch(handles_->copies, staged);
    copy(out + peer * shard_bytes, slot(peer, s) + peer * shard_bytes, shard_bytes,
         handles_->copies);
    write(handles_->copies, signals + peer, request.tag);
  }
}

void AllGather::begin(GatherRequest const& request, void* stream_handle) {
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  order_after_last_call(stream);
  AGMM_CHECK_CUDA(cudaEventRecord(handles_->fork, stream));
  AGMM_CHECK_CUDA(cudaStreamWaitEvent(handles_->copies, handles_->fork, 0));
  if (request.transport == Transport::CopyEnginePush) {
    push(request, next_slot_);
  } else {
    pull(request, next_slot_);
  }
  AGMM_CHECK_CUDA(cudaEventRecord(handles_->copies_done, handles_->copies));
  if (handles_->local_used) {
    AGMM_CHECK_CUDA(cudaStreamWaitEvent(stream, handles_->local_done, 0));
  }
  next_slot_ = (next_slot_ + 1) % kSlots;
}

void AllGather::end(void* stream_handle) {
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  AGMM_CHECK_CUDA(cudaStreamWaitEvent(stream, handles_->copies_done, 0));
  if (handles_->capture == 0) {
    AGMM_CHECK_CUDA(cudaEventRecord(handles_->call_done, stream));
    handles_->any_call = true;
  } else {
    AGMM_CHECK_CUDA(cudaEventRecord(handles_->captured_call_done, stream));
    handles_->last_capture = handles_->capture;
  }
}

}  // namespace agmm
