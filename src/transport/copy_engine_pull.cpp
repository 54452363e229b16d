// Pull by the copy engine: this rank copies every peer's staged shard into the caller's A.
#include <stdexcept>

#include "runtime/cuda.hpp"
#include "transport/gather_transport.hpp"
#include "transport/stage.hpp"
#include "transport/stream_ops.hpp"

namespace agmm {

namespace {

class CopyEnginePull final : public GatherTransport {
 public:
  char const* name() const override { return "pull"; }

  Gathered describe(Links const& links, GatherRequest const& request, int slot) const override {
    if (request.gather.a_out == nullptr) {
      throw std::invalid_argument(
          "a_out: found null, wanted the gathered A for the pull transport");
    }
    Gathered gathered = usual(links, request, slot, 1, "", true);
    gathered.a = request.gather.a_out;
    gathered.a_out = nullptr;  // complete by then
    gathered.arrival.senders.tags = links.memory.tags(links.memory.rank(), slot);
    return gathered;
  }

  bool has_copies() const override { return true; }

  void enqueue(Links const& links, GatherRequest const& request, Gathered const& gathered, int slot,
               CopyStream const& copy_stream, cudaStream_t stream) const override {
    uint32_t const tag = gathered.arrival.ready_value;
    stage_own_shard(links, request, tag, slot, copy_stream);
    AGMM_CHECK_CUDA(cudaStreamWaitEvent(stream, copy_stream.staged, 0));
    pull(links, request, tag, slot, copy_stream);
  }

 private:
  /// The own shard, to where the peers read it and into the caller's A.
  static void stage_own_shard(Links const& links, GatherRequest const& request, uint32_t tag,
                              int slot, CopyStream const& copy_stream) {
    SymmetricMemory const& memory = links.memory;
    int const rank = memory.rank();
    StageArgs args = stage_args(links, request, tag, slot);
    args.credits = memory.credits(rank, slot);
    args.peer_tags = links.peer_tags[slot];
    args.copies[0] = {
        request.gather.a_shard, memory.staged_shard(rank, slot),
        static_cast<char*>(request.gather.a_out) + std::size_t(rank) * request.shard_bytes(),
        request.shard_bytes()};
    AGMM_CHECK_CUDA(launch_stage(args, links.sm_count, copy_stream.copies));
    AGMM_CHECK_CUDA(cudaEventRecord(copy_stream.staged, copy_stream.copies));
  }

  static void pull(Links const& links, GatherRequest const& request, uint32_t tag, int slot,
                   CopyStream const& copy_stream) {
    SymmetricMemory const& memory = links.memory;
    auto* const out = static_cast<char*>(request.gather.a_out);
    uint32_t* const signals = memory.signals(memory.rank(), slot);
    uint32_t* const tags = memory.tags(memory.rank(), slot);
    // The signal of one peer's chunk and the wait for the next peer go in one batch.
    stream_ops::Batch ops;
    for (int i = 1; i < memory.world_size(); ++i) {
      int const peer = memory.rank_after(i);
      // Any tag will do here: the consumer compares it, and ends the process if it is another
      // call's.
      ops.push_back(stream_ops::wait_op(tags + peer, 1, CU_STREAM_WAIT_VALUE_GEQ));
      stream_ops::batch(copy_stream.copies, ops);
      stream_ops::copy(out + std::size_t(peer) * request.shard_bytes(),
                       memory.staged_shard(peer, slot), request.shard_bytes(), copy_stream.copies);
      ops.assign(1, stream_ops::write_op(signals + peer, tag));
    }
    stream_ops::batch(copy_stream.copies, ops);
  }
};

}  // namespace

GatherTransport const& copy_engine_pull() {
  static CopyEnginePull const transport;
  return transport;
}

}  // namespace agmm
