#include "transport/all_gather.hpp"

#include <memory>
#include <stdexcept>
#include <string>

#include "runtime/call_stream.hpp"
#include "runtime/cuda.hpp"
#include "transport/release.hpp"
#include "transport/stage.hpp"
#include "transport/stream_ops.hpp"

namespace agmm {

namespace {

constexpr int kLeastSms = 2;  // for a cluster of two CTAs, which the most used kernels have

}  // namespace

struct AllGather::Sequence : CopyStream {
  unsigned long long last_stream = 0;  // its id, of the last call
};

struct AllGather::Handles {
  std::unique_ptr<Sequence> sequences[SlotRing::kSequences];  // those that there was a call of
  uint32_t** peer_words = nullptr;  // device, [kSlots][2][w]: this rank's credit and tag at peer p

  // What belongs to the call entered.
  CallStream stream;
  int slot = 0;
  int sequence = 0;            // since its begin()
  bool copies_in_use = false;  // by it

  ~Handles() {
    if (peer_words != nullptr) cudaFree(peer_words);
    cudaGetLastError();
  }
};

AllGather::AllGather(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes,
                     int reserved_sms)
    : links_{SymmetricMemory(rank, bases, slot_bytes), kernels_device().sm_count - reserved_sms},
      device_(kernels_device().index) {
  if (reserved_sms < 0 || links_.sm_count < kLeastSms) {
    throw std::invalid_argument("reserved_sms: found " + std::to_string(reserved_sms) +
                                ", wanted 0 to " +
                                std::to_string(kernels_device().sm_count - kLeastSms));
  }
  auto handles = std::make_unique<Handles>();
  handles->sequences[0] = std::make_unique<Sequence>();
  SymmetricMemory const& memory = links_.memory;
  std::vector<uint32_t*> peer_words;
  for (int s = 0; s < SlotRing::kSlots; ++s) {
    for (int p = 0; p < world_size(); ++p) {
      peer_words.push_back(p == rank ? nullptr : memory.credits(p, s) + rank);
    }
    for (int p = 0; p < world_size(); ++p) peer_words.push_back(memory.tags(p, s) + rank);
  }
  std::size_t const bytes = peer_words.size() * sizeof(uint32_t*);
  AGMM_CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&handles->peer_words), bytes));
  AGMM_CHECK_CUDA(
      cudaMemcpy(handles->peer_words, peer_words.data(), bytes, cudaMemcpyHostToDevice));
  for (int s = 0; s < SlotRing::kSlots; ++s) {
    links_.peer_credits[s] = handles->peer_words + 2 * s * world_size();
    links_.peer_tags[s] = links_.peer_credits[s] + world_size();
  }
  AGMM_CHECK_CUDA(prepare_stage());
  AGMM_CHECK_CUDA(prepare_release());
  driver();
  handles_ = handles.release();
}

AllGather::~AllGather() { delete handles_; }

Gathered AllGather::next(GatherRequest const& request) const {
  Gather const& gather = request.gather;
  GatherTransport const& transport = transport_of(gather.transport);
  if (is_fp8(gather.dtype) && !transport.carries_scales()) {
    throw std::invalid_argument(std::string("transport: found ") + transport.name() +
                                " for fp8, wanted push or SM push");
  }
  std::size_t const bytes =
      std::size_t(world_size()) * (request.shard_bytes() + request.scale_bytes());
  if (bytes > slot_bytes()) {
    throw std::invalid_argument("A_shard: gathered it has " + std::to_string(bytes) +
                                " bytes, wanted at most the workspace's slot of " +
                                std::to_string(slot_bytes()));
  }
  return transport.describe(links_, request, handles_->slot);
}

int AllGather::slot() const { return handles_->slot; }
bool AllGather::is_captured() const { return handles_->stream.is_captured(); }

void AllGather::enter(void* stream) {
  handles_->stream = CallStream(static_cast<cudaStream_t>(stream));
  SlotRing::Capture const capture = handles_->stream.capture;
  if (ring_.is_broken(capture)) throw std::runtime_error(handles_->stream.broken());
  handles_->slot = ring_.next_slot(capture);
}

void AllGather::begin(GatherRequest const& request, Gathered const& gathered, void* stream_handle) {
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  SlotRing::Capture const capture = handles_->stream.capture;
  bool const is_first = ring_.find(capture) == SlotRing::kNone;
  // Streams and events come before the call is marked as begun: what fails here leaves nothing half
  // done.
  std::unique_ptr<Sequence>& place = handles_->sequences[ring_.place(capture)];
  if (place == nullptr) {
    RelaxedCapture const relaxed;
    place = std::make_unique<Sequence>();
  }
  Sequence& sequence = *place;
  handles_->sequence = ring_.begin(capture);
  // Calls of one workspace run one after the other also when they come on different streams.
  // Between eager calls and graph replays on different streams the caller has to order them, as
  // with NCCL.
  if (!is_first && (is_captured() || sequence.last_stream != handles_->stream.id)) {
    AGMM_CHECK_CUDA(cudaStreamWaitEvent(stream, sequence.call_done, 0));
  }
  handles_->copies_in_use = gathered.transport->has_copies();
  if (handles_->copies_in_use) {
    AGMM_CHECK_CUDA(cudaEventRecord(sequence.fork, stream));
    AGMM_CHECK_CUDA(cudaStreamWaitEvent(sequence.copies, sequence.fork, 0));
  }
  gathered.transport->enqueue(links_, request, gathered, handles_->slot, sequence, stream);
  // The consumer ends after the copies: it awaits their signals, or their word that all is sent. A
  // capture wants the streams joined too.
  if (handles_->copies_in_use && is_captured())
    AGMM_CHECK_CUDA(cudaEventRecord(sequence.copies_done, sequence.copies));
}

void AllGather::release(Gathered const& gathered, void* stream_handle) {
  SymmetricMemory const& memory = links_.memory;
  Release const& release = gathered.release;
  if (!gathered.transport->has_copies()) {
    // The words of a push are reset too, and there are as many signals as chunks.
    AGMM_CHECK_CUDA(launch_release(release, static_cast<cudaStream_t>(stream_handle)));
    return;
  }
  stream_ops::Batch ops;
  for (int i = 0; i < release.signal_count; ++i) {
    ops.push_back(stream_ops::write_op(release.signals + i, 0));
  }
  for (int i = 1; i < memory.world_size(); ++i) {
    uint32_t* const credits = memory.credits(memory.rank_before(i), slot());
    ops.push_back(stream_ops::write_op(credits + memory.rank(), 1));
  }
  // This wait needs no limit: peers gave their credits before they sent what the consumer has read.
  if (release.sent != nullptr) {
    ops.push_back(stream_ops::wait_op(release.sent, 1, CU_STREAM_WAIT_VALUE_EQ));
    ops.push_back(stream_ops::write_op(release.sent, 0));
  }
  stream_ops::batch(static_cast<cudaStream_t>(stream_handle), ops);
}

void AllGather::end(void* stream_handle) {
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  Sequence& sequence = *handles_->sequences[handles_->sequence];
  if (handles_->copies_in_use && is_captured()) {
    AGMM_CHECK_CUDA(cudaStreamWaitEvent(stream, sequence.copies_done, 0));
  }
  AGMM_CHECK_CUDA(cudaEventRecord(sequence.call_done, stream));
  sequence.last_stream = handles_->stream.id;
  ring_.end(handles_->stream.capture);
}

void AllGather::precede(void* stream) {
  std::lock_guard<std::mutex> const lock(mutex_);
  CallStream const next(static_cast<cudaStream_t>(stream));
  int const i = ring_.find(next.capture);
  if (i == SlotRing::kNone) return;
  Sequence const& sequence = *handles_->sequences[i];
  if (!next.is_captured() && sequence.last_stream == next.id) return;
  AGMM_CHECK_CUDA(cudaStreamWaitEvent(next.stream, sequence.call_done, 0));
}

void AllGather::abandon() noexcept {
  if (ring_.is_broken(handles_->stream.capture)) handles_->stream.abandon();
}

}  // namespace agmm
