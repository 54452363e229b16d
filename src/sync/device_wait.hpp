// Device side of the wait for a signal, with a limit.
//
// Memory order. The data of a chunk is written by a copy engine or a peer, then its signal, with
// release semantics at system scope.
//   1. A lane of the producer warp acquires the signal (ld.acquire.sys): the writer's data is
//      visible to that thread's ordinary accesses (the generic proxy).
//   2. __syncwarp() carries this to the lane that issues the TMA loads, where another one looked; a
//      barrier of the CTA, where another warp did.
//   3. That lane executes fence.proxy.async: what is visible to the generic proxy is visible to the
//      TMA loads (the async proxy) that it issues afterwards.
// Other threads learn that the chunk is ready only through the mbarrier that the load completes on.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "sync/wait_limit.hpp"
#include "sync/wait_report.hpp"

namespace agmm {

CUTLASS_DEVICE uint32_t load_acquire_system(uint32_t const* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

CUTLASS_DEVICE uint32_t load_acquire_gpu(uint32_t const* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

CUTLASS_DEVICE void store_release_gpu(uint32_t* word, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

CUTLASS_DEVICE void store_relaxed_system(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

CUTLASS_DEVICE void store_release_system(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

CUTLASS_DEVICE uint32_t add_acq_rel_gpu(uint32_t* word, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(word), "r"(value)
               : "memory");
  return old;
}

// These order no other access.

CUTLASS_DEVICE uint32_t load_relaxed_gpu(uint32_t const* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

/// Whether the word held `expected`, in place of which it holds `value` now.
CUTLASS_DEVICE bool exchange_relaxed_gpu(uint32_t* word, uint32_t expected, uint32_t value) {
  uint32_t found;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(found)
               : "l"(word), "r"(expected), "r"(value)
               : "memory");
  return found == expected;
}

CUTLASS_DEVICE uint32_t add_relaxed_gpu(uint32_t* word, uint32_t value) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(word), "r"(value)
               : "memory");
  return old;
}

CUTLASS_DEVICE void fence_acq_rel_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

/// Waits until the kernel ahead in the stream has ended and all that it wrote is visible to this
/// grid, where this kernel may start before that (CallSpec). Elsewhere it returns at once.
CUTLASS_DEVICE void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// Lets the kernel behind this one in the stream start its CTAs, where it may be launched
/// programmatically, once all CTAs of this one have called it or ended. Older GPUs have no such
/// launches.
CUTLASS_DEVICE void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Stands between the acquire of a signal and TMA loads of what it announced.
CUTLASS_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

/// Read anew wherever it is used, which takes no register in between.
CUTLASS_DEVICE int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

CUTLASS_DEVICE uint64_t global_timer_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

/// Reports once and never returns: the host, which looks every 20 ms and may take 5 s to find out
/// more, ends the process; should it not, the kernel traps.
CUTLASS_DEVICE void report_and_stop(WaitLimit const& limit, WaitReport::Kind kind, int32_t source,
                                    int32_t chunk, uint32_t seen, uint32_t wanted,
                                    uint64_t waited_ns) {
  WaitReport volatile* const report = limit.place.report;
  if (report != nullptr && atomicCAS(limit.place.report_lock, 0u, 1u) == 0u) {
    report->rank = limit.rank;
    report->source = source;
    report->chunk = chunk;
    report->seen = seen;
    report->wanted = wanted;
    report->waited_ns = waited_ns;
    report->limit_ns = limit.limit_ns;
    __threadfence_system();
    report->kind = kind;
    __threadfence_system();
  }
  uint64_t const start = global_timer_ns();
  while (global_timer_ns() - start < 5'000'000'000ull) __nanosleep(1'000'000);
  __trap();
}

/// The clock of a wait counts in units of 2^20 ns, in 32 bits: the producer warp has no register to
/// spare. A little more than a millisecond is fine enough for limits of seconds.
constexpr int kLogWaitUnitNs = 20;

/// Time since the first look of a wait, in units. `since`: 0 at the first look, then when that was.
CUTLASS_DEVICE uint32_t waited_units(uint32_t& since) {
  auto const now = static_cast<uint32_t>(global_timer_ns() >> kLogWaitUnitNs);
  if (since == 0) since = now;
  return now - since;
}

CUTLASS_DEVICE uint32_t limit_units(WaitLimit const& limit) {
  return uint32_t(limit.limit_ns >> kLogWaitUnitNs);
}

/// Leaves word of a wait that goes on. The host says so once it has taken AGMM_WARN_S.
CUTLASS_DEVICE void note_late(WaitLimit const& limit, bool is_credit, int32_t chunk,
                              uint32_t waited) {
  if (waited % LateWait::kUnits != LateWait::kUnits - 1 || limit.place.report == nullptr) return;
  limit.place.report->late_units = waited;
  limit.place.report->late_what = limit.place.late + LateWait::what(0, is_credit, chunk);
}

/// What a look at a signal finds: the signal, or, where it has the wanted value and the sources'
/// tags lie apart, the tag; the tag was there before the signal.
CUTLASS_DEVICE uint32_t look_at_signal(uint32_t const* word, uint32_t wanted, int32_t chunk,
                                       WaitLimit const& limit) {
  uint32_t const seen = load_acquire_system(word);
  uint32_t const* const tags = limit.senders.tags;
  return seen == wanted && tags != nullptr ? load_acquire_system(tags + chunk) : seen;
}

/// Called after a look that did not find the wanted value. Returns unless the wait has passed its
/// limit or the source called with something else. `since`: see waited_units().
CUTLASS_DEVICE void check_wait(uint32_t seen, uint32_t wanted, int32_t chunk,
                               WaitLimit const& limit, uint32_t& since) {
  uint32_t const waited = waited_units(since);
  Senders const& senders = limit.senders;
  uint32_t const tag = seen >> senders.count_bits;
  bool const mismatch = senders.mismatch_is_fatal && tag != 0 &&
                        (senders.count_bits == 0 || tag != wanted >> senders.count_bits);
  // A little late, so that a wait for a credit, which says more, reports first; also where ranks
  // share a GPU, which runs each for some milliseconds at a time.
  constexpr uint32_t kGraceUnits = 64;
  if (mismatch || waited > limit_units(limit) + kGraceUnits) {
    // This division stands within the branch: ahead of it, it costs producer warps registers, and
    // spills.
    int32_t const source = senders.chunks_per_rank > 0 ? chunk / senders.chunks_per_rank : -1;
    report_and_stop(limit, mismatch ? WaitReport::Mismatch : WaitReport::Timeout, source, chunk,
                    seen, wanted, uint64_t(waited) << kLogWaitUnitNs);
  }
  note_late(limit, false, chunk, waited);
}

/// Is to a wait for the credit of `peer`'s buffer `slot` what check_wait() is to one for a chunk.
CUTLASS_DEVICE void check_credit_wait(uint32_t seen, int32_t peer, int32_t slot,
                                      WaitLimit const& limit, uint32_t& since) {
  uint32_t const waited = waited_units(since);
  if (seen != 1 && waited > limit_units(limit)) {
    report_and_stop(limit, WaitReport::Credit, peer, slot, seen, 1,
                    uint64_t(waited) << kLogWaitUnitNs);
  }
  note_late(limit, true, peer, waited);
}

/// Returns when the signal has the wanted value, acquired at system scope. The caller still has to
/// execute fence_proxy_async_global() before its TMA loads. Past the limit this does not return.
CUTLASS_DEVICE void wait_signal(uint32_t const* word, uint32_t wanted, int32_t chunk,
                                WaitLimit const& limit) {
  uint32_t since = 0;
  CUTLASS_PRAGMA_NO_UNROLL
  for (;;) {
    uint32_t const seen = look_at_signal(word, wanted, chunk, limit);
    if (seen == wanted) return;
    check_wait(seen, wanted, chunk, limit, since);
  }
}

/// Returns when `credits[peer]` is 1, acquired at system scope. Past the limit it does not.
CUTLASS_DEVICE void wait_credit(uint32_t const* credits, int32_t peer, int32_t slot,
                                WaitLimit const& limit) {
  uint32_t since = 0;
  CUTLASS_PRAGMA_NO_UNROLL
  for (;;) {
    uint32_t const seen = load_acquire_system(credits + peer);
    if (seen == 1) return;
    check_credit_wait(seen, peer, slot, limit, since);
  }
}

}  // namespace agmm
