// SM push: warps of the consumer write the shard (push_warp.hpp); here is what they have to know.
#include "transport/sm_push.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "runtime/cuda.hpp"
#include "transport/gather_transport.hpp"

namespace agmm {

namespace {

using Single = WorkspaceLayout::Single;

// Bits of a signal that count; the tag is above them. It is one bit more than kMaxPushParts wants,
// and 24 bits are left to tell calls apart.
constexpr int kCountBits = 8;
static_assert(kMaxPushParts < (1 << kCountBits), "the count must not reach the tag");
constexpr int kVectorBytes = 16;  // of the widest load

void refuse(char const* name, int64_t found, std::string const& wanted) {
  throw std::invalid_argument("sm_push: found " + std::string(name) + "=" + std::to_string(found) +
                              ", wanted " + wanted);
}

/// The chunks of a shard's columns, as the grid of the consumer cuts them: so many, or as many
/// fewer as it takes for each to begin at a whole vector and to have columns. Rows that are no
/// whole vectors, which the matmul refuses, are one chunk.
ChunkGrid columns_of(Gather const& gather) {
  int const columns = std::max(gather.push.chunk_columns, 1);
  int chunks = std::max(ceil_div(gather.k, columns), 1);
  ChunkGrid found(1, gather.k, 1, chunks);
  auto const is_whole = [&] {
    return found.columns_per_chunk * element_bytes(gather.dtype) % kVectorBytes == 0;
  };
  while (chunks > 1 && !(is_whole() && (found.is_legal() || !is_fp8(gather.dtype)))) {
    found = ChunkGrid(1, gather.k, 1, --chunks);
  }
  return found;
}

void check(Gather const& gather, ChunkGrid const& columns, int world_size) {
  SmPushCut const& cut = gather.push;
  if (world_size > kMaxPushRanks) {
    refuse("ranks", world_size, "at most " + std::to_string(kMaxPushRanks));
  }
  if (cut.parts < 1 || cut.parts > kMaxPushParts || (cut.parts & (cut.parts - 1)) != 0) {
    refuse("parts", cut.parts, "a power of 2 up to " + std::to_string(kMaxPushParts));
  }
  if (columns.chunks_k < 1 || columns.chunks_k > kMaxColumnChunks) {
    refuse("chunks", columns.chunks_k, "1 to " + std::to_string(kMaxColumnChunks));
  }
  if (!columns.is_legal()) {
    refuse("chunks", columns.chunks_k, "as many as it takes to cover a row");
  }
  if (cut.head_chunks < 0) refuse("head_chunks", cut.head_chunks, "at least 0");
  if (cut.head_chunks != 0 && cut.first_peers != 0) {
    refuse("head_chunks", cut.head_chunks, "0 with first peers");
  }
}

PushOrder push_order(GatherRequest const& request, ChunkGrid const& columns, int world_size) {
  SmPushCut const& cut = request.gather.push;
  int const chunks = columns.chunks_k;
  KSplits const k_splits(ceil_div(request.gather.k, request.tile_k), request.splits);
  int const stretch_chunks =
      request.splits > 1 ? k_splits.stretch_chunks(request.tile_k, columns.columns_per_chunk,
                                                   chunks, request.are_splits_even)
                         : 0;
  int const peers = std::max(world_size - 1, 1);
  bool const two_rounds = 0 < cut.first_peers && cut.first_peers < peers;
  int64_t const chunk_bytes = int64_t(request.gather.rows) * columns.columns_per_chunk *
                              element_bytes(request.gather.dtype) *
                              (two_rounds ? cut.first_peers : peers);
  PushOrder order(chunks, request.splits, stretch_chunks);
  while (1 << order.log_parts < cut.parts) ++order.log_parts;
  auto const level_of = [&](int64_t most) {
    int32_t level = 0;
    while (level < order.log_parts && chunk_bytes >> (order.log_parts - level - 1) <= most) ++level;
    return level;
  };
  order.head_level = level_of(kHeadItemBytes);
  order.tail_level = level_of(kTailItemBytes);
  order.rounds = two_rounds ? 2 : 1;
  order.head_chunks = cut.head_chunks == 0 ? chunks : std::min(cut.head_chunks, chunks);
  return order;
}

class SmPush final : public GatherTransport {
 public:
  char const* name() const override { return "SM push"; }
  bool carries_scales() const override { return true; }

  Gathered describe(Links const& links, GatherRequest const& request, int slot) const override {
    SymmetricMemory const& memory = links.memory;
    Gather const& gather = request.gather;
    ChunkGrid const columns = columns_of(gather);
    check(gather, columns, memory.world_size());
    // Ranks that push in other parts must not take each other's sums for their own.
    std::string const how =
        " in " + std::to_string(gather.push.parts) + "x" + std::to_string(columns.chunks_k);
    Gathered gathered = usual(links, request, slot, columns.chunks_k, how, false);
    // What one part of a chunk adds to its signal beside the count: not 0.
    uint32_t const tag = gathered.arrival.ready_value << kCountBits | 1u << kCountBits;
    gathered.arrival.ready_value = tag + gather.push.parts;
    gathered.arrival.senders.count_bits = kCountBits;
    gathered.release.counter_count = WorkspaceLayout::kConsumerSingles;
    gathered.push = push_args(links, request, columns, tag, slot);
    return gathered;
  }

  bool has_copies() const override { return false; }

  void enqueue(Links const&, GatherRequest const&, Gathered const&, int, CopyStream const&,
               cudaStream_t) const override {}

 private:
  static SmPushArgs push_args(Links const& links, GatherRequest const& request,
                              ChunkGrid const& columns, uint32_t tag, int slot) {
    SymmetricMemory const& memory = links.memory;
    Gather const& gather = request.gather;
    int const rank = memory.rank();
    SmPushArgs args;
    args.rank = rank;
    args.world_size = memory.world_size();
    args.slot = slot;
    args.shard = gather.a_shard;
    args.rows = gather.rows;
    args.row_vectors = static_cast<int32_t>(request.row_bytes() / kVectorBytes);
    args.chunk_vectors = static_cast<int32_t>(columns.columns_per_chunk *
                                              element_bytes(gather.dtype) / kVectorBytes);
    args.order = push_order(request, columns, memory.world_size());
    args.first_peers = gather.push.first_peers;
    args.consumers_copy =
        std::size_t(memory.world_size() - 1) * request.shard_bytes() <= kConsumersCopyBytes;
    for (int p = 0; p < memory.world_size(); ++p) {
      args.places[p] = {memory.gather_buffer(p, slot) + std::size_t(rank) * request.shard_bytes(),
                        memory.signals(p, slot) + rank * columns.chunks_k};
    }
    args.scales = gather.scales;
    args.scales_behind =
        int64_t(memory.world_size() - rank) * static_cast<int64_t>(request.shard_bytes()) +
        rank * static_cast<int64_t>(request.scale_bytes());
    args.row_scales = gather.scale_columns;
    args.head = request.shared.head.size();
    args.tail = request.shared.tail.size();
    args.tag = tag;
    args.credits = memory.credits(rank, slot);
    args.claims = memory.single(slot, Single::HeadClaims);
    args.tail_claims = memory.single(slot, Single::TailClaims);
    args.go = memory.single(slot, Single::Go);
    return args;
  }
};

}  // namespace

GatherTransport const& sm_push() {
  static SmPush const transport;
  return transport;
}

bool has_peer_atomics(int device, int peer) {
  if (device == peer) return true;
  int found = 0;
  AGMM_CHECK_CUDA(
      cudaDeviceGetP2PAttribute(&found, cudaDevP2PAttrNativeAtomicSupported, device, peer));
  return found != 0;
}

}  // namespace agmm
