// Device side of the SM push transport: the share of a CTA that has no tile. What it has in common
// with the warps beside the matmul, and in which order who writes, is in push_warp.hpp.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "sync/device_wait.hpp"
#include "sync/mbarrier.hpp"
#include "sync/named_barrier.hpp"
#include "testing/fault.hpp"
#include "testing/stress_delay.hpp"
#include "transport/push_warp.hpp"
#include "transport/sm_push.hpp"

namespace agmm {

/// A CTA without a tile pushes items of the tail: kCopyThreads threads copy one after the other,
/// and a warp signals. By inference a fence waits for all that its multiprocessor has under way, so
/// the copies go on meanwhile, and the next fence serves all items that were copied until then.
/// More threads that copy have more under way, and are slower. The two wait for each other only:
/// what they copy waits for the head, kPatienceNs, and for credits, of which take_credits() has the
/// limit.
struct PushCta {
  // Measured on 4 H200 at 2048 x 2112 x 7168 (docs/dev/tried.md): 256 threads, or several teams,
  // take 0.7 to 20% longer.
  static constexpr int kCopyThreads = 128;
  static constexpr int kThreads = kCopyThreads + 32;
  // Places for items that wait for their signal; threads that copy wait where none is free. The
  // number is meant to exceed what is copied during a fence, and was not measured. It is small
  // where a test should find the queue full.
  static constexpr uint32_t kQueued = kStressDelays ? 2 : 8;

  /// The queue in shared memory. Copied item number i lies at place i % kQueued; the mbarriers, one
  /// arrival a phase, say that it is there and that it has been taken out.
  struct Queue {
    uint64_t copied[kQueued];
    uint64_t taken[kQueued];
    int32_t item[kQueued];
    uint32_t claim[2];  // the next item to copy, and the one after it
  };
};

namespace push_detail {

/// kCopyThreads threads copy the tail. It is begun after the head: all at once would fill the
/// links, and the first chunk would come late. Nothing is taken while they wait, so nobody waits
/// for it. The last item, which is not copied, is one beyond the tail.
template <bool kScales>
CUTLASS_DEVICE void copy_tail(SmPushArgs const& push, PushCta::Queue& queue, int32_t head_claims,
                              WaitLimit const& limit) {
  auto const thread = int(threadIdx.x);
  auto const sync = [] { named_barrier_sync<NamedBarrier::kTailCopied, PushCta::kCopyThreads>(); };
  uint32_t volatile* const claim = queue.claim;
  PushSizes const sizes(push);
  if (thread < kWarp) {
    await_head(push, head_claims);
    take_credits(push, false, look_at_credit(push), limit);
    if (thread == 0) claim[0] = atomicAdd(push.tail_claims, 1);
  }
  sync();
  CUTLASS_PRAGMA_NO_UNROLL
  for (uint32_t i = 0;; ++i) {
    auto const item = int(claim[i % 2]);
    bool const is_end = item >= push.order.tail_count();
    if (!is_end) {
      uint32_t const next = thread == 0 ? atomicAdd(push.tail_claims, 1) : 0;
      if (kSignalFirst && thread < kWarp) signal_item(push, push.order.item(true, item));
      stress_delay_warp(push.rank);
      copy_item<kScales, PushCta::kCopyThreads, 8>(push, sizes, push.order.item(true, item),
                                                   thread);
      if (thread == 0) claim[(i + 1) % 2] = next;
    }
    sync();  // all have copied their share
    if (thread == 0) {
      uint32_t const place = i % PushCta::kQueued, turn = i / PushCta::kQueued;
      // Places are free in the first turn; then the phase that ended in the turn before.
      while (turn != 0 && !mbarrier_test(&queue.taken[place], (turn - 1) % 2)) {
      }
      queue.item[place] = item;
      mbarrier_arrive(&queue.copied[place]);
    }
    if (is_end) return;
  }
}

/// Signals what copy_tail() copies, until the item beyond the tail. For a warp, of which lane 0
/// alone looks into shared memory.
CUTLASS_DEVICE void signal_tail(SmPushArgs const& push, PushCta::Queue& queue) {
  bool const looks = lane_id() == 0;
  CUTLASS_PRAGMA_NO_UNROLL
  for (uint32_t i = 0, copied = 0;;) {
    if (looks) {
      while (
          copied - i < PushCta::kQueued &&
          mbarrier_test(&queue.copied[copied % PushCta::kQueued], copied / PushCta::kQueued % 2)) {
        ++copied;
      }
    }
    copied = __shfl_sync(kAllLanes, copied, 0);
    if (copied == i) continue;
    stress_delay_warp(push.rank);
    bool is_fenced = false;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; i != copied; ++i) {
      uint32_t const place = i % PushCta::kQueued;
      int item = looks ? queue.item[place] : 0;
      if (looks) mbarrier_arrive(&queue.taken[place]);
      item = __shfl_sync(kAllLanes, item, 0);
      if (item >= push.order.tail_count()) return;
      // One for all of them. Its __syncwarp() carries what lane 0 acquired.
      await_late_credits(push, false);
      if (!is_fenced) fence_items(push);
      is_fenced = true;
      if constexpr (!kSignalFirst) add_to_signals(push, push.order.item(true, item));
      stress_delay_warp(push.rank);
    }
  }
}

}  // namespace push_detail

/// All that a CTA without a tile does, once the head was claimed `head_claims` times. True in the
/// warp that is the last to leave, when every item that the CTA has taken is signalled.
template <bool kScales>
CUTLASS_DEVICE bool push_tail(SmPushArgs const& push, PushCta::Queue& queue, int32_t head_claims,
                              WaitLimit const& limit) {
  using namespace push_detail;
  if (threadIdx.x == 0) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (uint32_t place = 0; place < PushCta::kQueued; ++place) {
      mbarrier_init(&queue.copied[place], 1);
      mbarrier_init(&queue.taken[place], 1);
    }
  }
  __syncthreads();
  if (threadIdx.x < PushCta::kCopyThreads) {
    copy_tail<kScales>(push, queue, head_claims, limit);
    return false;
  }
  if (threadIdx.x >= PushCta::kThreads) return false;
  signal_tail(push, queue);
  return true;
}

}  // namespace agmm
