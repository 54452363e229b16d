// Barriers of some of a CTA's threads (PTX barrier.cta), with a clobber, so that the compiler moves
// no memory access over them.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace agmm {

/// The barriers that agmm uses: from 8 on, which CUTLASS's kernels leave to others
/// (cutlass::arch::ReservedNamedBarriers). A CTA that only pushes has no tile, and none of
/// CUTLASS's barriers; nor has a grouped matmul, whose consumers stage their results, or a
/// streaming kernel.
enum class NamedBarrier : int {
  kTailCopied = 1,
  kStagedByFirst = 2,
  kStagedBySecond = 3,
  kTurnSeen = 4,
  kSplitK = 8,
  kFirstItemClaimed = 9,
  kFirstItemCopied = 10,
  kPartsAdded = 11,
  kSumMade = 12,
  kStarted = 13,
  kMayLoad = 14,
  kScalesHeld = 15,
};

/// Whole warps call it, `kThreads` threads in all; the threads of a warp need not come together.
template <NamedBarrier kBarrier, int kThreads>
CUTLASS_DEVICE void named_barrier_sync() {
  asm volatile("barrier.cta.sync %0, %1;" ::"n"(int(kBarrier)), "n"(kThreads) : "memory");
}

/// Arrives without waiting for the others.
template <NamedBarrier kBarrier, int kThreads>
CUTLASS_DEVICE void named_barrier_arrive() {
  asm volatile("barrier.cta.arrive %0, %1;" ::"n"(int(kBarrier)), "n"(kThreads) : "memory");
}

/// Whether the predicate holds in any of the threads; a barrier of these.
template <NamedBarrier kBarrier, int kThreads>
CUTLASS_DEVICE bool named_barrier_any(bool predicate) {
  uint32_t found = 0;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "barrier.cta.red.or.pred q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(found)
      : "r"(uint32_t(predicate)), "n"(int(kBarrier)), "n"(kThreads)
      : "memory");
  return found != 0;
}

}  // namespace agmm
