// Who computes which step of a matmul + reduce-scatter or + all-reduce. Steps are dealt out to
// clusters, one of every wave, so that neighbours share what they load from L2; but a cluster has
// to claim each, and those that run take over steps of clusters that have not started.
//
// Why not dealt out alone. A tile of the own chunk waits for tiles of other ranks. Steps of a
// cluster that is not on the GPU would be computed by nobody, and clusters that wait for them would
// keep its place: on a stream that has a part of the GPU (a green context, MPS), or beside a kernel
// that stays.
//
// The rule. A list is what is dealt out to one cluster; its steps are claimed in their order, by
// its own cluster or another. Until all clusters have started, a cluster begins a step only when
// all steps before it are claimed, and claims one of those that are not itself, to compute it
// first. The first step of each list needs no such look: clusters start in the order of their
// numbers, so those with the steps before it have started, and a cluster claims before it does
// anything else.
//
// Why all ends, however few clusters of a rank run. Say that nothing can go on, and take the first
// step p, counted alike on all ranks, that is not over on some rank. All steps before it are over
// on all ranks, and a step waits for none but earlier ones (scatter_order.hpp, lagged_order.hpp).
//   If a cluster there has claimed p, it is at another step q that it began before it claimed p,
//   and q waits for a step that is not over, so p < q. It began q when all before q were claimed,
//   or when all clusters had started, behind which it claims from its own list alone, in ascending
//   order, and what it took over before is before that. Either way p was claimed before: a
//   contradiction. If none has claimed p, no cluster that runs can be at a step q behind p: it
//   began q when all steps before were claimed, or when all had started; then the cluster whose
//   list has p has started, and is at a step before p, which is over. So those that run go on, or
//   end and make room for the next to start, until one claims p.
// A claim waits for nobody outside but, for kPatienceNs, for clusters that start late: the claim
// behind a step is made when the loads of that step begin. A sender that holds back a signal has
// sent a tile, whose loads began, so its next step comes.
//
// The words are 0 before a launch: how many clusters have started, how many make no claims any
// more, and of each list how many steps are claimed. Whoever makes the last claims sets them back.
// Claims order no memory: they say who computes a tile, and the data of a tile come with their own
// signals.
#pragma once

#include <cstdint>

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/cutlass.h"
#include "sync/device_wait.hpp"
#include "sync/mbarrier.hpp"
#include "testing/stress_delay.hpp"
#include "transport/tile_push.hpp"

namespace agmm {

/// A place in the sequence of what a cluster claims.
struct ClaimNumber {
  static constexpr uint32_t kAhead = 8;  // claims between the warp that makes them and the slowest

  uint32_t number = 0;

  CUTLASS_DEVICE uint32_t index() const { return number % kAhead; }
  CUTLASS_DEVICE uint32_t parity() const { return number / kAhead % 2; }
};

/// The claims that a cluster makes. For all lanes of a warp, but begin().
class ClaimList {
 public:
  static constexpr int32_t kNone = -1;

  /// `words`: kClaimWords; `clusters`: of the launch; `cluster`: this one.
  CUTLASS_DEVICE ClaimList(uint32_t* words, int32_t steps, int32_t clusters, int32_t cluster)
      : words_(words), steps_(steps), clusters_(clusters), cluster_(cluster) {}

  /// The claim of the list's first step. For one lane, before everything else; what comes before
  /// first() hides how long it takes.
  CUTLASS_DEVICE void begin() {
    stress_delay(cluster_);
    own_ = next_of_list();
    add_relaxed_gpu(words_ + kStarted, 1);
  }

  /// The step that begin() claimed, or where others have taken it over, as next(). For all lanes,
  /// behind begin() by the first.
  CUTLASS_DEVICE int32_t first() {
    own_ = step_of(__shfl_sync(0xffffffffu, own_, 0));
    first_step_ = own_ == cluster_ ? own_ : claimable();
    return first_step_;
  }
  CUTLASS_DEVICE int32_t first_step() const { return first_step_; }

  /// The next step to compute, or kNone.
  CUTLASS_DEVICE int32_t next() {
    if (!is_own_pending_) {
      int32_t wave = kNone;
      if (lane_id() == 0 && own_ + clusters_ < steps_) {
        stress_delay(cluster_);
        wave = next_of_list();
      }
      wave = __shfl_sync(0xffffffffu, wave, 0);
      own_ = wave == kNone ? kNone : step_of(wave);
    }
    return claimable();
  }

  /// Comes behind the last claim; the last cluster of all sets the words back.
  CUTLASS_DEVICE void finish() {
    uint32_t const before = lane_id() == 0 ? add_relaxed_gpu(words_ + kEnded, 1) : 0;
    if (__shfl_sync(0xffffffffu, before, 0) + 1 != uint32_t(clusters_)) return;
    for (int32_t i = lane_id(); i < kLists + clusters_; i += 32) words_[i] = 0;
  }

 private:
  static constexpr int kStarted = 0;
  static constexpr int kEnded = 1;
  static constexpr int kLists = kClaimCounts;
  static constexpr uint64_t kPatienceNs = 8000;

  /// Claims the next step of the own list, whose place in the list it returns.
  CUTLASS_DEVICE int32_t next_of_list() {
    return int32_t(add_relaxed_gpu(words_ + kLists + cluster_, 1));
  }
  CUTLASS_DEVICE int32_t step_of(int32_t wave) const {
    int32_t const step = cluster_ + wave * clusters_;
    return step < steps_ ? step : kNone;
  }

  /// The own step that is claimed, or one before it that nobody has claimed.
  CUTLASS_DEVICE int32_t claimable() {
    uint64_t const since = has_started_ ? 0 : global_timer_ns();
    CUTLASS_PRAGMA_NO_UNROLL
    while (own_ != kNone && !has_started_) {
      has_started_ = load_relaxed_gpu(words_ + kStarted) == uint32_t(clusters_);
      // The first step that nobody has, of all lists.
      int32_t least = own_;
      for (int32_t list = lane_id(); list < clusters_; list += 32) {
        int32_t const wave = int32_t(load_relaxed_gpu(words_ + kLists + list));
        // Step 0 is left to its own cluster, which has started: it takes the credits.
        least = min_of(least, list + (list == 0 ? max_of(wave, 1) : wave) * clusters_);
      }
      least = __reduce_min_sync(0xffffffffu, least);
      if (least == own_) break;
      if (has_patience_ && global_timer_ns() - since < kPatienceNs) continue;
      has_patience_ = false;
      int32_t const wave = least / clusters_;
      bool is_claimed = false;
      if (lane_id() == 0) {
        uint32_t* const word = words_ + kLists + (least - wave * clusters_);
        is_claimed = exchange_relaxed_gpu(word, uint32_t(wave), uint32_t(wave) + 1);
      }
      if (__any_sync(0xffffffffu, is_claimed)) {
        is_own_pending_ = true;
        return least;
      }
    }
    is_own_pending_ = false;
    return own_;
  }

  uint32_t* words_;
  int32_t steps_;
  int32_t clusters_;
  int32_t cluster_;
  int32_t own_ = kNone;  // the last claim of the own list
  int32_t first_step_ = kNone;
  bool is_own_pending_ = false;  // claimed, but others come first
  bool has_started_ = false;     // every cluster
  bool has_patience_ = true;  // with clusters that start late; not once one was found to be absent
};

/// A cluster's claims, on their way from the warp that makes them, one in the first CTA, to those
/// that take them, in all CTAs.
template <int kClusterSize>
class ClaimedSteps {
 public:
  struct Storage {
    uint64_t full[ClaimNumber::kAhead];
    uint64_t empty[ClaimNumber::kAhead];
    uint64_t begun;
    int32_t steps[ClaimNumber::kAhead];
  };

  /// One thread calls it, before a barrier of the cluster. `takers`: warps of a CTA that take each
  /// claim.
  CUTLASS_DEVICE static void init(Storage& storage, uint32_t takers) {
    CUTLASS_PRAGMA_UNROLL
    for (uint32_t i = 0; i < ClaimNumber::kAhead; ++i) {
      mbarrier_init(&storage.full[i], 1);
      mbarrier_init(&storage.empty[i], takers * kClusterSize);
    }
    mbarrier_init(&storage.begun, 1);
  }

  /// Whether this CTA makes the claims of its cluster.
  CUTLASS_DEVICE static bool makes_claims() {
    return kClusterSize == 1 || cute::block_rank_in_cluster() == 0;
  }

  /// Gives a claim to all CTAs. For one lane.
  CUTLASS_DEVICE static void put(Storage& storage, ClaimNumber at, int32_t step) {
    // Free in the first turn; then the phase that ended in the turn before.
    if (at.number >= ClaimNumber::kAhead)
      mbarrier_wait(&storage.empty[at.index()], at.parity() ^ 1);
    if constexpr (kClusterSize == 1) {
      storage.steps[at.index()] = step;
      mbarrier_arrive(&storage.full[at.index()]);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int cta = 0; cta < kClusterSize; ++cta) {
        store_and_arrive_in_cluster(&storage.steps[at.index()], step, &storage.full[at.index()],
                                    cta);
      }
    }
  }

  /// Makes the claims behind the first, and ends when others have taken them: this CTA must not end
  /// before those that arrive here have. `kLast`: how often takers are told that no step is left,
  /// once for each group of takers that takes its own claims. For all lanes of a warp.
  template <int kLast>
  CUTLASS_DEVICE static void make_claims(Storage& storage, ClaimList& list) {
    ClaimNumber at{1};
    for (int32_t step = list.first_step(); step != ClaimList::kNone; ++at.number) {
      mbarrier_wait(&storage.begun, (at.number - 1) % 2);
      step = list.next();
      if (lane_id() == 0) put(storage, at, step);
    }
    list.finish();
    if (lane_id() != 0) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < kLast; ++i, ++at.number) put(storage, at, ClaimList::kNone);
    CUTLASS_PRAGMA_NO_UNROLL
    for (uint32_t i = 0; i < ClaimNumber::kAhead; ++i, ++at.number) {
      if (at.number >= ClaimNumber::kAhead) {
        mbarrier_wait(&storage.empty[at.index()], at.parity() ^ 1);
      }
    }
  }

  /// All lanes of a warp call it. The lane that reads the claim is the one that arrives, so nothing
  /// but its own program order has to say that the claim was read before the next one comes.
  CUTLASS_DEVICE static int32_t take(Storage& storage, ClaimNumber at) {
    mbarrier_wait(&storage.full[at.index()], at.parity());
    int32_t step = ClaimList::kNone;
    if (lane_id() == 0) {
      step = storage.steps[at.index()];
      if constexpr (kClusterSize == 1) {
        mbarrier_arrive(&storage.empty[at.index()]);
      } else {
        mbarrier_arrive_in_cluster(&storage.empty[at.index()], 0);
      }
    }
    return __shfl_sync(0xffffffffu, step, 0);
  }

  /// The loads of a tile begin. For one lane; the next tile's wait for the claim that this lets be
  /// made, so no phase is passed over. Only where claims are made does anybody wait for it.
  CUTLASS_DEVICE static void begin(Storage& storage) { mbarrier_arrive(&storage.begun); }
};

}  // namespace agmm
