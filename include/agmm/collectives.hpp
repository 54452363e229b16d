// all_gather, reduce_scatter and all_reduce of a group of ranks that reach each other's memory, one
// kernel for each call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "agmm/limits.hpp"

namespace agmm {

enum class CollectiveOp : int32_t { AllGather = 0, ReduceScatter = 1, AllReduce = 2 };

/// How the data travels, and in how many steps.
enum class CollectiveMethod : int32_t {
  OneShot = 0,  // packets, each with its signal; every rank sends all that others need at once
  TwoShot = 1,  // the same in two steps: a sum of each part, then the sums. For AllReduce alone
  Blocks = 2    // blocks with a signal each; AllReduce in two steps
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

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace agmm
