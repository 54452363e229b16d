// A transport: one way to move the shards of an all-gather. AllGather keeps the protocol that all
// of them share; a transport says what its consumer has to know, and enqueues what moves the data.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "agmm/arrival.hpp"
#include "agmm/gather.hpp"
#include "order/chunking.hpp"
#include "symmetric/layout.hpp"
#include "sync/release.hpp"
#include "transport/sm_push.hpp"

namespace agmm {

struct CopyStream;
struct StageArgs;
class GatherTransport;

/// One call.
struct GatherRequest {
  Gather gather{};
  SharedRows shared{};  // rows of the gathered A that the consumer does not read from a_shard
  // How many splits of K the consumer has, whether even ones, and its tiles: the chunks come in
  // that order.
  int32_t splits = 1;
  bool are_splits_even = false;
  int32_t tile_k = 64;

  std::size_t row_bytes() const {
    return static_cast<std::size_t>(gather.k) * element_bytes(gather.dtype);
  }
  std::size_t shard_bytes() const { return static_cast<std::size_t>(gather.rows) * row_bytes(); }
  /// Bytes of a shard's scales, which lie behind all shards in the gather buffer.
  std::size_t scale_bytes() const {
    return is_fp8(gather.dtype) ? static_cast<std::size_t>(gather.rows) *
                                      static_cast<std::size_t>(gather.scale_columns) * sizeof(float)
                                : 0;
  }
};

/// What the consumer of one call has to know. The parts go into its CallSpec as they are.
struct Gathered {
  void const* a = nullptr;        // [w * rows, k]; own rows only as far as `shared` says
  float const* scales = nullptr;  // [w * rows, scale_columns] of fp8, without the own ones
  void* a_out = nullptr;          // where the consumer has to store all of A, or null
  Arrival arrival{};
  Release release{};  // to be done by the consumer once it has read everything
  SmPushArgs push{};  // what the consumer's spare warps have to do
  GatherTransport const* transport = nullptr;
};

/// What every transport of a workspace works on.
struct Links {
  SymmetricMemory memory;
  int sm_count = 0;  // multiprocessors for this workspace's kernels
  // Device arrays of w pointers per slot: this rank's word at peer p. The credits are null at this
  // rank's place.
  uint32_t* const* peer_credits[WorkspaceLayout::kSlots]{};
  uint32_t* const* peer_tags[WorkspaceLayout::kSlots]{};
};

/// A way in which the chunks of a gather move. It has no state: one object serves all calls.
class GatherTransport {
 public:
  virtual ~GatherTransport() = default;

  /// What messages call it.
  virtual char const* name() const = 0;

  /// Whether it moves the scales of fp8 operands beside their rows.
  virtual bool carries_scales() const { return false; }

  /// Throws std::invalid_argument when the request does not fit; enqueues nothing.
  virtual Gathered describe(Links const& links, GatherRequest const& request, int slot) const = 0;

  /// Whether enqueue() uses the copy stream, which has then been forked from the caller's.
  virtual bool has_copies() const = 0;

  /// Enqueues all that comes before the consumer, and the copies beside it. Throws
  /// std::runtime_error when CUDA refuses.
  virtual void enqueue(Links const& links, GatherRequest const& request, Gathered const& gathered,
                       int slot, CopyStream const& copy_stream, cudaStream_t stream) const = 0;

 protected:
  /// What all have in common. `column_chunks`: of a shard. `how`: what the ranks have to agree on
  /// beside shape and dtype.
  Gathered usual(Links const& links, GatherRequest const& request, int slot, int column_chunks,
                 std::string const& how, bool copies_a) const;
  /// The arguments of the stage kernel.
  static StageArgs stage_args(Links const& links, GatherRequest const& request, uint32_t tag,
                              int slot);
};

/// The transport of that name. Throws std::invalid_argument where there is none.
GatherTransport const& transport_of(Transport transport);

/// The three.
GatherTransport const& copy_engine_push();
GatherTransport const& copy_engine_pull();
GatherTransport const& sm_push();

}  // namespace agmm
