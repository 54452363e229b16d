// all_gather, reduce_scatter and all_reduce of a group of ranks that reach each other's memory, one
// kernel for each call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "agmm/async_input_mm.hpp"
#include "agmm/limits.hpp"

namespace agmm {

enum class CollectiveOp : int32_t { AllGather = 0, ReduceScatter = 1, AllReduce = 2 };

/// How the data travels, and in how many steps.
enum class CollectiveMethod : int32_t {
  OneShot = 0,  // packets, each with its signal; every rank sends all that others need at once
  TwoShot = 1,  // packets: each rank's shard of the sum, then the sums. For AllReduce alone
  Blocks = 2,   // blocks with a signal each; AllReduce in two steps
  Relayed = 3   // packets over links alone (relay_over). For AllGather and AllReduce
};

/// The element types. Byte is for AllGather alone, which moves any bytes.
enum class CollectiveElement : int32_t { Byte = 0, BFloat16 = 1, Float16 = 2, Float32 = 3 };

constexpr char const* to_string(CollectiveElement element) {
  switch (element) {
    case CollectiveElement::Byte:
      return "bytes";
    case CollectiveElement::BFloat16:
      return "bfloat16";
    case CollectiveElement::Float16:
      return "float16";
    default:
      return "float32";
  }
}

/// One call of w ranks. Sums are made in float32, in the order of the ranks, and rounded once:
/// every rank and every method gets the same bits.
struct Collective {
  CollectiveOp op = CollectiveOp::AllReduce;
  CollectiveMethod method = CollectiveMethod::OneShot;
  CollectiveElement element = CollectiveElement::BFloat16;
  void const* in = nullptr;  // [count]; for ReduceScatter [w, count]
  void* out = nullptr;       // [count]; for AllGather [w, count]. AllReduce: may be `in`
  int64_t count = 0;
  bool is_average = false;              // sums are multiplied by 1 / w
  int32_t ctas = 0;                     // of a launch; 0: chosen by size. Alike on all ranks
  uint64_t limit_ns = kDefaultLimitNs;  // of each wait; past it the process ends
};

/// A residual add and RMS norm of the sum of an AllReduce, one shot or two. The sum, rounded, is
/// added to `residual`, which is the same on all ranks and as long as the sum; the result, rounded,
/// is `out`. `normed` is the RMS norm of `out`, row by row, times `weight`: computed in float32 and
/// rounded once. Every rank and either method gets the same bits.
struct ResidualNorm {
  void const* residual = nullptr;  // may be `out`
  void const* weight = nullptr;    // [row]
  void* normed = nullptr;          // may be `in`
  int64_t row = 0;                 // elements; up to kMaxNormRowBytes
  float eps = 0;
};
/// A second tensor of an AllGather, which moves in the same launch where both find room in a slot.
/// Bytes, as the scales of fp8 values are.
struct Beside {
  void const* in = nullptr;  // [count]
  void* out = nullptr;       // [w, count]
  int64_t count = 0;
};

/// The bytes of the longest row. A CTA holds a row in its 48 KiB of static shared memory, beside
/// partial sums of 1 KiB.
constexpr int64_t kMaxNormRowBytes = 47 << 10;

/// The RMS norm of the rows of a StreamedSum, times `weight`: computed in float32 and rounded once.
/// With `scales` what is rounded is quantised to fp8 (e4m3), as quantize() does it.
struct StreamedNorm {
  void const* weight = nullptr;  // [n]; null: rows are not normed
  void* normed = nullptr;        // [m, n]
  float eps = 0;
  float* scales = nullptr;  // [m], or [m, ceil(n / 128)]; null: none
  bool of_blocks = false;   // whether a scale is that of 128 columns
};

/// all_reduce(A @ B) (+ bias) (+ residual) of few rows in one kernel, or reduce_scatter: a
/// streaming kernel multiplies and sends its sums, rounded, to all ranks, or to the rank that adds
/// them up for itself, or in two shots for all. They are added in the order of the ranks in
/// float32, and what bias and residual add to is rounded once. Every rank and either method gets
/// the same bits, in every call. An all_reduce may norm its rows in the same kernel.
struct StreamedSum {
  AsyncInputArgs matmul{};  // its A has come; rank, limit and multiprocessors are filled in
  // This is as long as out and of its dtype, or null; of an all_reduce it is the same on all ranks.
  void const* residual = nullptr;
  CollectiveOp op = CollectiveOp::AllReduce;            // or ReduceScatter of m / w rows each
  CollectiveMethod method = CollectiveMethod::OneShot;  // or TwoShot of an AllReduce
  bool is_average = false;                              // the sum is multiplied by 1 / w
  StreamedNorm norm{};                                  // of an AllReduce
};

/// all_gather, then the product of what was gathered and a weight by a streaming kernel, which may
/// start while the gather awaits its peers and reads its weight meanwhile.
struct GatheredMatmul {
  Collective gather{};
  AsyncInputArgs matmul{};  // of gather.out; rank, limit and multiprocessors are filled in
};

/// A call without elements, which moves nothing: it ends when all ranks have come to it. No other
/// kind of call has its tag, so a rank whose call does have elements is found out.
struct Meeting {
  CollectiveMethod method = CollectiveMethod::OneShot;  // not TwoShot
  void const* in = nullptr;                             // a word of device memory
  void* out = nullptr;                                  // one for each rank
  std::string agreed;                                   // what all ranks have to agree on
  std::string words;  // for the message to ranks whose calls differ
  uint64_t limit_ns = kDefaultLimitNs;
};

/// The id of the capture that a stream is in; 0 where there is none.
uint64_t capture_of(void* stream);
/// The id of a stream. After the stream is destroyed another one may get its handle, but not its
/// id.
uint64_t stream_id(void* stream);

/// One transfer of a shard over a link: `source` holds the shard of `owner` and sends it to
/// `target`.
struct RelayMove {
  int32_t owner;
  int32_t source;
  int32_t target;
};

/// Collectives on one workspace: symmetric memory of a group of ranks. Safe to call from several
/// threads; calls run one after the other, in the same order on all ranks.
///
/// A call of any size fits: one that is larger than a slot takes several launches.
class Collectives {
 public:
  /// Bytes of symmetric memory that a workspace needs on every rank. `slot_bytes` is a multiple of
  /// 128; half of it bounds what the method Blocks moves in one launch.
  static std::size_t workspace_bytes(std::size_t slot_bytes, int world_size);

  /// Makes the collectives of 2 to 8 ranks on their workspaces; the arguments are those of
  /// FusedAllGatherMatmul's constructor. All words from words_offset on have to be 0.
  Collectives(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes,
              int reserved_sms = 0);
  ~Collectives();
  Collectives(Collectives const&) = delete;
  Collectives& operator=(Collectives const&) = delete;

  std::size_t slot_bytes() const;

  /// Enqueues the call. Returns whether the stream is being captured into a graph. Throws
  /// std::invalid_argument, with nothing enqueued, where the call makes no sense.
  bool operator()(Collective const& call, void* stream);
  bool operator()(Collective const& call, ResidualNorm const& norm, void* stream);
  bool operator()(Collective const& call, Beside const& beside, void* stream);
  bool operator()(Meeting const& meeting, void* stream);
  bool operator()(StreamedSum const& call, void* stream);
  bool operator()(GatheredMatmul const& call, void* stream);

  /// Makes what is enqueued on `stream` from now on wait for the last call: the last eager one, or
  /// the last one of the capture that `stream` is in. Calls of other workspaces of the group need
  /// it.
  void precede(void* stream);

  /// Sets the routes of Relayed. In `moves` each rank gets each other rank's shard once, from its
  /// owner or from a rank that got it from there. The moves are alike on all ranks.
  void relay_over(std::vector<RelayMove> const& moves);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace agmm
