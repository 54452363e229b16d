#include "transport/gather_transport.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "runtime/cuda.hpp"
#include "sync/signals.hpp"
#include "transport/stage.hpp"

namespace agmm {

Gathered GatherTransport::usual(Links const& links, GatherRequest const& request, int slot,
                                int column_chunks, std::string const& how, bool copies_a) const {
  SymmetricMemory const& memory = links.memory;
  int const rank = memory.rank();
  Gather const& gather = request.gather;
  bool const is_bf16 = gather.dtype == DType::BFloat16;
  std::string const scaling =
      gather.scale_columns == 1 ? "" : " by " + std::to_string(gather.scale_columns);
  std::string const what = (is_fp8(gather.dtype) ? to_string(gather.dtype) + scaling
                            : is_bf16            ? "bfloat16"
                                                 : "float16") +
                           how;
  // 31 bits, not 0: pull waits on its stream for "at least 1" as a signed number.
  uint32_t const tag = std::max(call_tag(gather.rows, gather.k, what, copies_a) & 0x7fffffffu, 1u);

  Gathered gathered;
  gathered.transport = this;
  char const* const buffer = memory.gather_buffer(rank, slot);
  gathered.a = buffer;
  if (is_fp8(gather.dtype)) {
    std::size_t const all_shards = std::size_t(memory.world_size()) * request.shard_bytes();
    gathered.scales = reinterpret_cast<float const*>(buffer + all_shards);
  }
  gathered.a_out = gather.a_out;
  gathered.arrival = {
      memory.signals(rank, slot),       tag, memory.world_size(), column_chunks, rank,
      {nullptr, column_chunks, 0, true}};
  // Tags and signals are one stretch.
  gathered.release = {memory.tags(rank, slot),
                      (1 + column_chunks) * memory.world_size(),
                      memory.single(slot, WorkspaceLayout::Single::FinishedWarps),
                      1,
                      links.peer_credits[slot],
                      memory.world_size(),
                      nullptr};
  return gathered;
}

StageArgs GatherTransport::stage_args(Links const& links, GatherRequest const& request,
                                      uint32_t tag, int slot) {
  SymmetricMemory const& memory = links.memory;
  StageArgs args;
  args.world_size = memory.world_size();
  args.slot = slot;
  args.finished_ctas = memory.single(slot, WorkspaceLayout::Single::StageCtas);
  args.tag = tag;
  args.own_signal = memory.signals(memory.rank(), slot) + memory.rank();
  args.limit.place = report_place(memory.rank());
  args.limit.limit_ns = request.gather.limit_ns;
  args.limit.rank = memory.rank();
  return args;
}

GatherTransport const& transport_of(Transport transport) {
  switch (transport) {
    case Transport::CopyEnginePush:
      return copy_engine_push();
    case Transport::CopyEnginePull:
      return copy_engine_pull();
    case Transport::SmPush:
      return sm_push();
  }
  throw std::invalid_argument("transport: found " + std::to_string(int(transport)) +
                              ", wanted push, pull or SM push");
}

}  // namespace agmm
