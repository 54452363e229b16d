// all_gather, reduce_scatter and all_reduce of a group of ranks that reach each other's memory, one
// kernel for each call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "agmm/limits.hpp"

namespace agmm {

enum class CollectiveOp : int32_t { AllGather = 0, ReduceScatter = 1, AllReduce = 2 };

/// How the data travels, and in how many steps.
enum class CollectiveMethod : int32_t {
  OneShot = 0,  // packets, each with its signal; every rank sends all that others need at once
  TwoShot = 1,  // the same in two steps: a sum of each part, then the sums. For AllReduce alone
  Blocks = 2,   // blocks with a signal each; AllReduce in two steps
  Relayed = 3   // packets over links alone (relay_over). For AllGather and AllReduce
};

/// What is gathered need not be numbers.
enum class CollectiveElement : int32_t { Byte = 0, BFloat16 = 1, Float16 = 2, Float32 = 3 };

/// A call of w ranks. Sums are made in float32, in the order of the ranks, and rounded once: every
/// rank and every method gets the same bits.
struct Collective {
  CollectiveOp op = CollectiveOp::AllReduce;
  CollectiveMethod method = CollectiveMethod::OneShot;
  CollectiveElement element = CollectiveElement::BFloat16;
  void const* in = nullptr;  // [count], of ReduceScatter [w, count]
  void* out = nullptr;       // [count], of AllGather [w, count]; may be `in` of AllReduce
  int64_t count = 0;
  bool is_average = false;              // sums are multiplied by 1 / w
  int32_t ctas = 0;                     // of a launch; 0: what the size wants. Alike on all ranks
  uint64_t limit_ns = kDefaultLimitNs;  // of each wait; past it the process ends
};

/// What becomes of the sum of an AllReduce, one shot or two: rounded, it is added to `residual`,
/// which is the same on all ranks and as long, and that rounded is `out`. `normed` is its RMS norm,
/// row by row, times `weight`: computed in float32 and rounded once. Every rank and either method
/// gets the same bits.
struct ResidualNorm {
  void const* residual = nullptr;  // may be `out`
  void const* weight = nullptr;    // [row]
  void* normed = nullptr;          // may be `in`
  int64_t row = 0;                 // elements; up to kMaxNormRowBytes
  float eps = 0;
};
/// A CTA keeps a row in shared memory: 48 KiB without asking for more, but for partial sums.
constexpr int64_t kMaxNormRowBytes = 47 << 10;

/// A call without elements, which moves nothing: it ends when all ranks have come to it. Its tag is
/// that of no other kind of call, so ranks that do have elements are told apart.
struct Meeting {
  CollectiveMethod method = CollectiveMethod::OneShot;  // not TwoShot
  void const* in = nullptr;                             // a word of device memory
  void* out = nullptr;                                  // one for each rank
  std::string agreed;                                   // what all ranks have to agree on
  std::string words;  // for the message to ranks whose calls differ
  uint64_t limit_ns = kDefaultLimitNs;
};

/// The capture that a stream is in, by its id; 0: none.
uint64_t capture_of(void* stream);
/// The id of a stream: another one may get its handle once it is destroyed, but not its id.
uint64_t stream_id(void* stream);

/// A shard on its way over a link: `source` has it, of `owner`, and sends it to `target`.
struct RelayMove {
  int32_t owner;
  int32_t source;
  int32_t target;
};

/// Collectives on one workspace: symmetric memory of a group of ranks. Safe to call from several
/// threads; calls run one after the other, in the same order on all ranks.
///
/// A call of any size fits: what is larger than a slot takes several launches.
class Collectives {
 public:
  /// Bytes of symmetric memory that a workspace needs on every rank. `slot_bytes`, a multiple of
  /// 128, bounds what Blocks move in one launch: half of it.
  static std::size_t workspace_bytes(std::size_t slot_bytes, int world_size);

  /// As FusedAllGatherMatmul's, for 2 to 8 ranks. All words from words_offset on are 0 before.
  Collectives(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes,
              int reserved_sms = 0);
  ~Collectives();
  Collectives(Collectives const&) = delete;
  Collectives& operator=(Collectives const&) = delete;

  std::size_t slot_bytes() const;

  /// Returns whether the stream is being captured into a graph. Throws std::invalid_argument where
  /// the call makes no sense, and nothing is enqueued.
  bool operator()(Collective const& call, void* stream);
  bool operator()(Collective const& call, ResidualNorm const& norm, void* stream);
  bool operator()(Meeting const& meeting, void* stream);

  /// What is enqueued on `stream` from now on comes behind the last call: the last eager one, or
  /// that of the capture that `stream` is in. For calls of other workspaces of the group.
  void precede(void* stream);

  /// The ways of Relayed: in `moves` each rank gets each other's shard once, from its owner or from
  /// one that got it from there. Alike on all ranks.
  void relay_over(std::vector<RelayMove> const& moves);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace agmm
