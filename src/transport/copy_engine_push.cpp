// Push by the copy engine: this rank writes its shard into every peer's gather buffer.
#include "runtime/cuda.hpp"
#include "transport/gather_transport.hpp"
#include "transport/stage.hpp"
#include "transport/stream_ops.hpp"

namespace agmm {

namespace {

using Single = WorkspaceLayout::Single;

class CopyEnginePush final : public GatherTransport {
 public:
  char const* name() const override { return "push"; }

  bool carries_scales() const override { return true; }

  Gathered describe(Links const& links, GatherRequest const& request, int slot) const override {
    Gathered gathered = usual(links, request, slot, 1, "", false);
    if (links.memory.world_size() > 1) {
      gathered.release.sent = links.memory.single(slot, Single::Sent);
    }
    return gathered;
  }

  bool has_copies() const override { return true; }

  void enqueue(Links const& links, GatherRequest const& request, Gathered const& gathered, int slot,
               CopyStream const& copy_stream, cudaStream_t stream) const override {
    uint32_t const tag = gathered.arrival.ready_value;
    if (!request.shared.head.empty() || !request.shared.tail.empty()) {
      copy_boundary_rows(links, request, tag, slot, stream);
    }
    take_credits(links, slot, copy_stream);
    push(links, request, tag, slot, copy_stream);
  }

 private:
  /// The rows of the own slot that the consumer's boundary tiles read.
  static void copy_boundary_rows(Links const& links, GatherRequest const& request, uint32_t tag,
                                 int slot, cudaStream_t stream) {
    SymmetricMemory const& memory = links.memory;
    std::size_t const own_offset = std::size_t(memory.rank()) * request.shard_bytes();
    auto const* const shard = static_cast<char const*>(request.gather.a_shard);
    StageArgs args = stage_args(links, request, tag, slot);
    int i = 0;
    for (Range const rows : {request.shared.head, request.shared.tail}) {
      std::size_t const begin = std::size_t(rows.begin) * request.row_bytes();
      args.copies[i++] = {shard + (begin - own_offset),
                          memory.gather_buffer(memory.rank(), slot) + begin, nullptr,
                          std::size_t(rows.size()) * request.row_bytes()};
    }
    AGMM_CHECK_CUDA(launch_stage(args, links.sm_count, stream));
  }

  static void take_credits(Links const& links, int slot, CopyStream const& copy_stream) {
    SymmetricMemory const& memory = links.memory;
    uint32_t* const credits = memory.credits(memory.rank(), slot);
    stream_ops::Batch ops;
    for (int i = 1; i < memory.world_size(); ++i) {
      uint32_t* const credit = credits + memory.rank_before(i);
      ops.push_back(stream_ops::wait_op(credit, 1, CU_STREAM_WAIT_VALUE_EQ));
      ops.push_back(stream_ops::write_op(credit, 0));
    }
    stream_ops::batch(copy_stream.copies, ops);
  }

  static void push(Links const& links, GatherRequest const& request, uint32_t tag, int slot,
                   CopyStream const& copy_stream) {
    SymmetricMemory const& memory = links.memory;
    int const rank = memory.rank();
    // Nearest consumer first: r-1 computes this shard next after its own.
    for (int i = 1; i < memory.world_size(); ++i) {
      int const peer = memory.rank_before(i);
      stream_ops::copy(memory.gather_buffer(peer, slot) + std::size_t(rank) * request.shard_bytes(),
                       request.gather.a_shard, request.shard_bytes(), copy_stream.copies);
      stream_ops::copy(memory.gather_buffer(peer, slot) +
                           std::size_t(memory.world_size()) * request.shard_bytes() +
                           std::size_t(rank) * request.scale_bytes(),
                       request.gather.scales, request.scale_bytes(), copy_stream.copies);
      uint32_t* const signal = memory.signals(peer, slot) + rank;
      if (i + 1 < memory.world_size()) {
        stream_ops::write(copy_stream.copies, signal, tag);
        continue;
      }
      stream_ops::Batch ops{stream_ops::write_op(signal, tag),
                            stream_ops::write_op(memory.single(slot, Single::Sent), 1)};
      stream_ops::batch(copy_stream.copies, ops);
    }
  }
};

}  // namespace

GatherTransport const& copy_engine_push() {
  static CopyEnginePush const transport;
  return transport;
}

}  // namespace agmm
