// Device side of the SM push transport: the share of one warp, or of a team of warps. Any number of
// them may push, at any time and in any order: items are claimed, so those that run do the work of
// those that do not run yet.
#pragma once

#include <cstdint>

#include "agmm/device_wait.hpp"
#include "agmm/fault.hpp"
#include "agmm/sm_push.hpp"
#include "agmm/stress_delay.hpp"
#include "cutlass/cutlass.h"

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
/// seen any more, so the warp that has the first item says in `go` that it saw all of them; the
/// others look at both. Only the first warp has the limit, for want of registers: the others have
/// what they wait for when it has.
CUTLASS_DEVICE void take_credits(SmPushArgs const& push, bool is_first, uint32_t seen,
                                 WaitLimit const& limit) {
  int const lane = lane_id();
  uint64_t start = 0;
  CUTLASS_PRAGMA_NO_UNROLL
  for (;; seen = look_at_credit(push)) {
    if (kNoCredit || __all_sync(kAllLanes, seen == 1)) break;
    if (!is_first) {
      if (__any_sync(kAllLanes, load_acquire_gpu(push.go) == 1)) break;
      continue;
    }
    uint64_t const now = global_timer_ns();
    if (start == 0) start = now;
    if (seen != 1 && now - start > limit.limit_ns) {
      report_and_stop(limit, WaitReport::Credit, lane, push.slot, seen, 1, now - start);
    }
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

/// Copies the item to the places of its ranks, to the own one the edges only. For `kThreads`
/// threads together, of which this is number `thread`; a load or store of a warp covers two rows by
/// 256 bytes. kLoadsInFlight: of 16 bytes, per thread.
template <int kThreads, int kLoadsInFlight>
CUTLASS_DEVICE void copy_item(SmPushArgs const& push, PushOrder::Item const& item, int thread) {
  constexpr int kRowLanes = 16;
  constexpr int kRows = kThreads / kRowLanes;
  Range const ranks = ranks_of(push, item);
  Range const rows{first_row(push, item.part), first_row(push, item.part + item.parts)};
  int32_t const end = min_of((item.chunk + 1) * push.chunk_vectors, push.row_vectors);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int32_t column = item.chunk * push.chunk_vectors + thread % kRowLanes; column < end;
       column += kRowLanes) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t row = rows.begin + thread / kRowLanes; row < rows.end;
         row += kRows * kLoadsInFlight) {
      uint4 values[kLoadsInFlight];
      int32_t const at = row * push.row_vectors + column;  // a shard has less than 2^31 vectors
      auto const* from = static_cast<uint4 const*>(push.shard) + at;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kLoadsInFlight; ++j, from += kRows * push.row_vectors) {
        if (row + j * kRows < rows.end) values[j] = load_once(from);
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int p = ranks.begin; p < ranks.end; ++p) {
        auto* to = static_cast<uint4*>(push.places[peer_at(push, p)].rows) + at;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kLoadsInFlight; ++j, to += kRows * push.row_vectors) {
          int32_t const r = row + j * kRows;
          bool const wanted =
              p + 1 < push.world_size || r < push.head || r >= push.rows - push.tail;
          if (r < rows.end && wanted) *to = values[j];
        }
      }
    }
  }
}

CUTLASS_DEVICE void signal_item(SmPushArgs const& push, PushOrder::Item const& item) {
  stress_delay_warp(push.rank);
  Range const ranks = ranks_of(push, item);
  int const peer = peer_at(push, ranks.begin + lane_id());
  bool const adds = lane_id() < ranks.size();
  if (adds && item.part == 0 && item.chunk == 0 && peer != push.rank) {
    store_relaxed_system(push.credits + peer, 0);
  }
  __syncwarp();
  if constexpr (!kNoFence) fence_acq_rel_system();
  stress_delay_warp(push.rank);
  if (adds) {
    add_relaxed_system(push.places[peer].signals + item.chunk,
                       item.parts + (item.part == 0 ? push.tag : 0));
  }
}

/// How long some wait for others that may not run at all, because something else has the
/// multiprocessors.
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
    __nanosleep(1000);
  }
}

/// Waits until most of the `head_warps` warps have found no more of the head, at most kPatienceNs.
CUTLASS_DEVICE void await_head(SmPushArgs const& push, int32_t head_warps) {
  int32_t const last = push.order.head_count() + head_warps * 3 / 4;
  uint64_t const start = global_timer_ns();
  while (__any_sync(kAllLanes, int(load_acquire_gpu(push.claims)) < last &&
                                   global_timer_ns() - start < kPatienceNs)) {
  }
}

/// A warp takes items of the head or of the tail until there are none left.
template <bool kTail>
CUTLASS_DEVICE void push_items(SmPushArgs const& push, WaitLimit const& limit) {
  uint32_t const first = lane_id() == 0 ? atomicAdd(kTail ? push.tail_claims : push.claims, 1) : 0;
  uint32_t const seen = look_at_credit(push);  // while the claim is under way
  int item = __shfl_sync(kAllLanes, int(first), 0);
  if (item >= push.order.count(kTail)) return;
  take_credits(push, item == 0 && !kTail, seen, limit);
  CUTLASS_PRAGMA_NO_UNROLL
  for (;;) {
    if constexpr (kSignalFirst) signal_item(push, push.order.item(kTail, item));
    stress_delay_warp(push.rank);
    copy_item<kWarp, 4>(push, push.order.item(kTail, item), lane_id());
    asm volatile("" : "+r"(item));  // what follows from it is computed again, not kept in registers
    uint32_t const next = lane_id() == 0 ? atomicAdd(kTail ? push.tail_claims : push.claims, 1) : 0;
    // Long enough to hide the claim.
    if constexpr (!kSignalFirst) signal_item(push, push.order.item(kTail, item));
    item = __shfl_sync(kAllLanes, int(next), 0);
    if (item >= push.order.count(kTail)) return;
  }
}

}  // namespace push_detail

// Order. Nobody writes before it has acquired the credits, or the word of the warp that has. The
// writes of a warp or team precede its barrier, which precedes each lane's fence and that lane's
// addition (release pattern at system scope); a consumer that acquires the sum of all parts'
// additions has acquired the writes of all. A peer's credit is reset before the addition of the
// first part of the first chunk, which that peer needs before it can give the next credit.

/// What a warp beside the matmul does: the head. It takes part in the tail only if the CTAs that
/// should push it do not, because something else keeps them from running. For all lanes together.
CUTLASS_DEVICE void push_head(SmPushArgs const& push, WaitLimit const& limit) {
  using namespace push_detail;
  push_items<false>(push, limit);
  if (push.order.tail_count() != 0 && tail_needs_help(push)) push_items<true>(push, limit);
}

/// Of a CTA without a tile: kThreads threads that copy an item together, so that one fence serves
/// many bytes; the fences of one multiprocessor run one after the other. While the team's first
/// warp waits for its fence, the others copy the next item.
struct PushTeam {
  static constexpr int kThreads = 128;

  int index;                 // in its CTA
  int thread;                // in the team
  uint32_t volatile* claim;  // two words in shared memory

  CUTLASS_DEVICE void sync() const {
    asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "n"(kThreads) : "memory");
  }
};

/// What a team does: the tail, after the head. All at once would fill the links, and the first
/// chunk would come late. It takes nothing while it waits, so nobody waits for what it has taken.
CUTLASS_DEVICE void push_tail(SmPushArgs const& push, PushTeam const& team, int32_t head_warps,
                              WaitLimit const& limit) {
  using namespace push_detail;
  bool const leads = team.thread < kWarp;
  if (leads) {
    await_head(push, head_warps);
    take_credits(push, false, look_at_credit(push), limit);
    if (team.thread == 0) team.claim[0] = atomicAdd(push.tail_claims, 1);
  }
  team.sync();
  CUTLASS_PRAGMA_NO_UNROLL
  for (int turn = 0;; turn ^= 1) {
    int const item = int(team.claim[turn]);
    if (item >= push.order.tail_count()) return;
    uint32_t const next = team.thread == 0 ? atomicAdd(push.tail_claims, 1) : 0;
    if (kSignalFirst && leads) signal_item(push, push.order.item(true, item));
    stress_delay_warp(push.rank);
    copy_item<PushTeam::kThreads, 8>(push, push.order.item(true, item), team.thread);
    if (team.thread == 0) team.claim[turn ^ 1] = next;
    team.sync();
    if (!kSignalFirst && leads) signal_item(push, push.order.item(true, item));
  }
}

}  // namespace agmm
