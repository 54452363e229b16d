// Device side of the SM push transport: the share of a warp beside the matmul; push_cta.hpp has
// that of a CTA without a tile. Any number of them may push, at any time and in any order: items
// are claimed, so those that run do the work of those that do not run yet.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "sync/device_wait.hpp"
#include "sync/named_barrier.hpp"
#include "testing/fault.hpp"
#include "testing/stress_delay.hpp"
#include "transport/sm_push.hpp"

namespace agmm {

namespace push_detail {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

CUTLASS_DEVICE void add_relaxed_system(uint32_t* word, uint32_t value) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
}

CUTLASS_DEVICE uint4 load_once(uint4 const* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

/// The rank that is served at this place in the order: the nearest consumer, r - 1, first, and this
/// rank itself last.
CUTLASS_DEVICE int peer_at(SmPushArgs const& push, int position) {
  int const peer = push.rank - 1 - position;
  return peer < 0 ? peer + push.world_size : peer;
}

/// The credit of the peer that the lane stands for; 1 for the other lanes.
CUTLASS_DEVICE uint32_t look_at_credit(SmPushArgs const& push) {
  int const peer = lane_id();
  bool const has_peer = peer < push.world_size && peer != push.rank;
  return has_peer ? load_acquire_system(push.credits + peer) : 1;
}

/// Returns when every peer's slot is free for this rank. A credit that has been taken cannot be
/// seen any more, so the warp that has the first item says in `go` that it saw all of them. All
/// look at both, that warp too: its CTA's consumers may have said so before (claim_first_item), and
/// the warp with the first item of the second round may have taken its credits since. Only the
/// first warp has the limit, for want of registers: the others have what they wait for when it has.
CUTLASS_DEVICE void take_credits(SmPushArgs const& push, bool is_first, uint32_t seen,
                                 WaitLimit const& limit) {
  if constexpr (kNoCredit) return;  // await_late_credits() does
  int const lane = lane_id();
  uint32_t since = 0;
  CUTLASS_PRAGMA_NO_UNROLL
  for (;; seen = look_at_credit(push)) {
    if (__all_sync(kAllLanes, seen == 1)) break;
    if (__any_sync(kAllLanes, load_acquire_gpu(push.go) == 1)) break;
    if (is_first) check_credit_wait(seen, lane, push.slot, limit, since);
  }
  __syncwarp();
  if (is_first && lane == 0) store_release_gpu(push.go, 1);
}

/// Places [begin, end) in the order of ranks.
CUTLASS_DEVICE Range ranks_of(SmPushArgs const& push, PushOrder::Item const& item) {
  // The last in the order is this rank itself, where it has edges.
  int const all = push.world_size - (push.head + push.tail == 0 ? 1 : 0);
  if (push.order.rounds == 1) return {0, all};
  return item.round == 0 ? Range{0, push.first_peers} : Range{push.first_peers, all};
}

CUTLASS_DEVICE int32_t first_row(SmPushArgs const& push, int32_t part) {
  return int32_t(int64_t(part) * push.rows >> push.order.log_parts);
}

/// What a copy asks SmPushArgs at every store, by value. Where the arguments come by reference
/// (push_only), any store might change them to the compiler, which loads them again behind each.
/// The pushing warps, which read the kernel's parameters, have no registers for it.
struct PushSizes {
  int32_t row_vectors, world_size, rows, head, tail;

  CUTLASS_DEVICE explicit PushSizes(SmPushArgs const& push)
      : row_vectors(push.row_vectors),
        world_size(push.world_size),
        rows(push.rows),
        head(push.head),
        tail(push.tail) {}
};

/// `sizes`: PushSizes, or `push` itself.
template <int kThreads, int kLoadsInFlight, int kRowLanes, class Sizes>
CUTLASS_DEVICE void copy_rows(SmPushArgs const& push, Sizes const& sizes,
                              PushOrder::Item const& item, int thread) {
  constexpr int kRows = kThreads / kRowLanes;
  Range const ranks = ranks_of(push, item);
  Range const rows{first_row(push, item.part), first_row(push, item.part + item.parts)};
  int32_t const end = min_of((item.chunk + 1) * push.chunk_vectors, sizes.row_vectors);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int32_t column = item.chunk * push.chunk_vectors + thread % kRowLanes; column < end;
       column += kRowLanes) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t row = rows.begin + thread / kRowLanes; row < rows.end;
         row += kRows * kLoadsInFlight) {
      uint4 values[kLoadsInFlight];
      int32_t const at = row * sizes.row_vectors + column;  // a shard has less than 2^31 vectors
      auto const* from = static_cast<uint4 const*>(push.shard) + at;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kLoadsInFlight; ++j, from += kRows * sizes.row_vectors) {
        if (row + j * kRows < rows.end) values[j] = load_once(from);
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int p = ranks.begin; p < ranks.end; ++p) {
        auto* to = static_cast<uint4*>(push.places[peer_at(push, p)].rows) + at;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kLoadsInFlight; ++j, to += kRows * sizes.row_vectors) {
          int32_t const r = row + j * kRows;
          bool const wanted =
              p + 1 < sizes.world_size || r < sizes.head || r >= sizes.rows - sizes.tail;
          if (r < rows.end && wanted) *to = values[j];
        }
      }
    }
  }
}

/// Copies the scales of the item's rows to its ranks, which read the own ones where they are. Every
/// tile awaits the first chunk, in one of its splits of K at least.
template <int kThreads>
CUTLASS_DEVICE void copy_scales(SmPushArgs const& push, PushOrder::Item const& item, int thread) {
  if (item.chunk != 0) return;
  Range const ranks = ranks_of(push, item);
  int32_t const end = first_row(push, item.part + item.parts) * push.row_scales;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int32_t i = first_row(push, item.part) * push.row_scales + thread; i < end; i += kThreads) {
    float const scale = __ldg(push.scales + i);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int p = ranks.begin; p < ranks.end && p + 1 < push.world_size; ++p) {
      char* const rows = static_cast<char*>(push.places[peer_at(push, p)].rows);
      reinterpret_cast<float*>(rows + push.scales_behind)[i] = scale;
    }
  }
}

/// Copies the item to the places of its ranks, to the own one the edges only. For `kThreads`
/// threads together, of which this is number `thread`; a load or store of a warp covers two rows by
/// 256 bytes, or four by 128. kLoadsInFlight: of 16 bytes, per thread. kScales: rows have scales.
template <bool kScales, int kThreads, int kLoadsInFlight, class Sizes>
CUTLASS_DEVICE void copy_item(SmPushArgs const& push, Sizes const& sizes,
                              PushOrder::Item const& item, int thread) {
  if constexpr (kScales) copy_scales<kThreads>(push, item, thread);
  // The width is a template argument, since the pushing warps have no register for a number.
  if (push.chunk_vectors > 8) {
    copy_rows<kThreads, kLoadsInFlight, 16>(push, sizes, item, thread);
  } else {
    copy_rows<kThreads, kLoadsInFlight, 8>(push, sizes, item, thread);
  }
}
template <bool kScales, int kThreads, int kLoadsInFlight>
CUTLASS_DEVICE void copy_item(SmPushArgs const& push, PushOrder::Item const& item, int thread) {
  copy_item<kScales, kThreads, kLoadsInFlight>(push, push, item, thread);
}

/// The fault no_credit: what is copied awaits no credit, but what is signalled does, so that
/// signals and credits stay in step and wrong elements are all that comes of it. For the first
/// item, and for all others, which have to wait for its warp.
CUTLASS_DEVICE void await_late_credits(SmPushArgs const& push, bool is_first) {
  if constexpr (kNoCredit) {
    constexpr uint32_t kLimitUnits = 60'000'000'000ull >> kLogWaitUnitNs;  // a minute
    uint32_t since = 0;
    while (is_first && !__all_sync(kAllLanes, look_at_credit(push) == 1)) {
      if (waited_units(since) > kLimitUnits) __trap();
    }
    __syncwarp();
    if (is_first && lane_id() == 0) store_release_gpu(push.go, 1);
    while (!__any_sync(kAllLanes, load_acquire_gpu(push.go) == 1)) {
      if (waited_units(since) > kLimitUnits) __trap();
    }
  }
}

/// The lane's fence, after which it may add to signals.
CUTLASS_DEVICE void fence_items(SmPushArgs const& push) {
  __syncwarp();
  if constexpr (!kNoFence) fence_acq_rel_system();
  stress_delay_warp(push.rank);
}

/// A lane per rank. After fence_items().
CUTLASS_DEVICE void add_to_signals(SmPushArgs const& push, PushOrder::Item const& item) {
  Range const ranks = ranks_of(push, item);
  if (lane_id() >= ranks.size()) return;
  add_relaxed_system(push.places[peer_at(push, ranks.begin + lane_id())].signals + item.chunk,
                     item.parts + (item.part == 0 ? push.tag : 0));
}

CUTLASS_DEVICE void signal_item(SmPushArgs const& push, PushOrder::Item const& item) {
  stress_delay_warp(push.rank);
  await_late_credits(push, item.part == 0 && item.chunk == 0 && item.round == 0);
  if (item.part == 0 && item.chunk == 0) {
    // No credit is reset before somebody has seen all of them. The first item's warp has; in the
    // second round this is another one, and waits for it, whose own wait has the limit.
    while (item.round != 0 && !__any_sync(kAllLanes, load_acquire_gpu(push.go) == 1)) {
    }
    Range const ranks = ranks_of(push, item);
    int const peer = peer_at(push, ranks.begin + lane_id());
    if (lane_id() < ranks.size() && peer != push.rank) store_relaxed_system(push.credits + peer, 0);
  }
  fence_items(push);
  add_to_signals(push, item);
}

/// How long some wait for others that may not run at all, because something else has the
/// multiprocessors. A choice: long beside the tens of microseconds that a head takes in a call that
/// goes well, short beside the limit of a wait.
constexpr uint64_t kPatienceNs = 500'000;

/// Waits until the tail has been taken, by others: false; or until nobody has taken any of it for
/// kPatienceNs: true.
CUTLASS_DEVICE bool tail_needs_help(SmPushArgs const& push) {
  uint32_t before = 0;
  uint64_t since = global_timer_ns();
  for (;;) {
    uint32_t const taken = __shfl_sync(kAllLanes, load_acquire_gpu(push.tail_claims), 0);
    if (int(taken) >= push.order.tail_count()) return false;
    if (taken != before) {
      before = taken;
      since = global_timer_ns();
    }
    if (__any_sync(kAllLanes, global_timer_ns() - since > kPatienceNs)) return true;
    __nanosleep(1000);  // so that the looks take nothing from those who copy
  }
}

/// Waits until the head was claimed so often, at most kPatienceNs.
CUTLASS_DEVICE void await_head(SmPushArgs const& push, int32_t claims) {
  uint64_t const start = global_timer_ns();
  while (__any_sync(kAllLanes, int(load_acquire_gpu(push.claims)) < claims &&
                                   global_timer_ns() - start < kPatienceNs)) {
  }
}

/// Makes a claim, which is under way in lane 0 on return.
template <bool kTail>
CUTLASS_DEVICE uint32_t claim(SmPushArgs const& push) {
  return lane_id() == 0 ? atomicAdd(kTail ? push.tail_claims : push.claims, 1) : 0;
}

/// A warp that has taken this item of the head or of the tail, and others until there are none
/// left. is_copied: it has only to be signalled.
template <bool kScales, bool kTail>
CUTLASS_DEVICE void push_items(SmPushArgs const& push, int item, bool is_copied) {
  CUTLASS_PRAGMA_NO_UNROLL
  for (; item < push.order.count(kTail); is_copied = false) {
    if constexpr (kSignalFirst) signal_item(push, push.order.item(kTail, item));
    stress_delay_warp(push.rank);
    // With the fault half of the lanes' stores are not to be seen yet when the signal is.
    if (!is_copied && (!kNoFence || lane_id() < kWarp / 2)) {
      copy_item<kScales, kWarp, 4>(push, push.order.item(kTail, item), lane_id());
    }
    asm volatile("" : "+r"(item));  // what follows from it is computed again, not kept in registers
    uint32_t const next = claim<kTail>(push);
    // Long enough to hide the claim.
    if constexpr (!kSignalFirst) signal_item(push, push.order.item(kTail, item));
    if constexpr (kNoFence) {
      stress_delay_warp(push.rank);
      if (!is_copied && lane_id() >= kWarp / 2) {
        copy_item<kScales, kWarp, 4>(push, push.order.item(kTail, item), lane_id());
      }
    }
    item = __shfl_sync(kAllLanes, int(next), 0);
  }
}

/// All that a warp does for the head or the tail.
template <bool kScales, bool kTail>
CUTLASS_DEVICE void push_all(SmPushArgs const& push, WaitLimit const& limit) {
  uint32_t const first = claim<kTail>(push);
  uint32_t const seen = look_at_credit(push);  // while the claim is under way
  int const item = __shfl_sync(kAllLanes, int(first), 0);
  if (item >= push.order.count(kTail)) return;
  take_credits(push, item == 0 && !kTail, seen, limit);
  push_items<kScales, kTail>(push, item, false);
}

template <bool kScales>
CUTLASS_DEVICE void help_with_tail(SmPushArgs const& push, WaitLimit const& limit) {
  if (push.order.tail_count() != 0 && tail_needs_help(push)) push_all<kScales, true>(push, limit);
}

}  // namespace push_detail

// Order. Nobody writes before it has acquired the credits, or the word of the warp that has. The
// writes of a warp precede its barrier, which precedes each lane's fence and that lane's addition
// (release pattern at system scope). Where consumers copy, the barrier kFirstItemCopied precedes
// them too. In a CTA that only pushes, the barrier of those that copy precedes an arrival at the
// item's mbarrier, which releases; lane 0 of the signalling warp acquires it by its test, and the
// warp's barrier precedes each lane's fence and addition, which are cumulative. A consumer that
// acquires the sum of all parts' additions has acquired the writes of all. A peer's credit is reset
// before the addition of the first part of the first chunk, which that peer needs before it can
// give the next credit.

/// The first item of a CTA with a tile, in shared memory. Its consumers, most of which would wait
/// for their first tile of A meanwhile, copy it all at once, where the warp that pushes takes
/// several turns of loads: so the first chunks, which every CTA of the peers waits for, are there
/// sooner. One item only: with more under way its fence takes longer.
struct FirstItem {
  int32_t item;  // beyond the head: there is none
  // Else for the warp that pushes; also where the credits were not there at once, so that the
  // consumers wait for nothing.
  int32_t is_for_consumers;
};

/// The first warp of the consumers calls it before the kernel sets up its barriers.
CUTLASS_DEVICE void claim_first_item(SmPushArgs const& push, FirstItem& first) {
  using namespace push_detail;
  uint32_t const claimed = claim<false>(push);
  stress_delay_warp(push.rank);
  bool has_credits = __all_sync(kAllLanes, look_at_credit(push) == 1) || kNoCredit;
  // They cannot be seen any more when the first item is on its way.
  if (!has_credits) has_credits = __any_sync(kAllLanes, load_acquire_gpu(push.go) == 1);
  __syncwarp();
  if (lane_id() == 0) {
    if (claimed == 0 && has_credits && !kNoCredit) store_release_gpu(push.go, 1);
    first = {int32_t(claimed), push.consumers_copy && has_credits && !kSignalFirst};
  }
}

/// All `kThreads` consumers call it once their first warp has claimed. The barriers have no limit
/// and need none: they are the CTA's own, and those who come to them wait for nobody outside the
/// cluster before.
template <bool kScales, int kThreads>
CUTLASS_DEVICE void copy_first_item(SmPushArgs const& push, FirstItem const& first, int thread) {
  using namespace push_detail;
  named_barrier_sync<NamedBarrier::kFirstItemClaimed, kThreads>();
  FirstItem const volatile& claimed = first;
  if (claimed.is_for_consumers && claimed.item < push.order.head_count()) {
    stress_delay_warp(push.rank);
    copy_item<kScales, kThreads, 2>(push, push.order.item(false, claimed.item), thread);
    stress_delay_warp(push.rank);
  }
  named_barrier_arrive<NamedBarrier::kFirstItemCopied, kThreads + kWarp>();
}

/// What a warp beside the matmul does: the head. It takes part in the tail only if the CTAs that
/// should push it do not, because something else keeps them from running. For all lanes together.
template <bool kScales>
CUTLASS_DEVICE void push_head(SmPushArgs const& push, WaitLimit const& limit) {
  using namespace push_detail;
  push_all<kScales, false>(push, limit);
  help_with_tail<kScales>(push, limit);
}

/// Pushes the head where `kThreads` consumers copy the first item.
template <bool kScales, int kThreads>
CUTLASS_DEVICE void push_head_after(FirstItem const& first, SmPushArgs const& push,
                                    WaitLimit const& limit) {
  using namespace push_detail;
  named_barrier_sync<NamedBarrier::kFirstItemCopied, kThreads + kWarp>();
  FirstItem const volatile& copied = first;
  int item = copied.item;
  bool const has_item = item < push.order.head_count();
  bool is_copied = copied.is_for_consumers != 0;
  if (has_item && !is_copied) {
    stress_delay_warp(push.rank);
    take_credits(push, item == 0, look_at_credit(push), limit);
  } else if (has_item && push.order.tail_count() == 0) {
    // Nothing comes before the signal, for which every CTA of the peers waits. But a tail is begun
    // when the head's claims say so, and takes longest.
    signal_item(push, push.order.item(false, item));
    item = __shfl_sync(kAllLanes, int(claim<false>(push)), 0);
    is_copied = false;
  }
  push_items<kScales, false>(push, item, is_copied);
  help_with_tail<kScales>(push, limit);
}

}  // namespace agmm
