// Device side of a call's end: who is last resets the signals and gives the buffers back.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "sync/device_wait.hpp"
#include "sync/release.hpp"
#include "testing/fault.hpp"

namespace agmm {

/// All lanes of each of the `count` warps that take part call it. It stands at the end of the
/// kernel, which it delays: one thread that resets hundreds of signals and gives one credit after
/// the other took 6 us more.
CUTLASS_DEVICE void finish(Release const& release, int32_t count, WaitLimit const& limit) {
  if (release.signals == nullptr) return;
  __syncwarp();
  uint32_t const before = lane_id() == 0 ? add_acq_rel_gpu(release.counters, 1) : 0;
  if (__shfl_sync(0xffffffffu, before, 0) + 1 != uint32_t(count)) return;
  __syncwarp();  // the shuffle carries no memory order
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = lane_id(); i < release.counter_count; i += 32) release.counters[i] = 0;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = lane_id(); i < release.signal_count; i += 32) release.signals[i] = 0;
  __syncwarp();
  fence_acq_rel_system();
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = lane_id(); i < release.peer_count; i += 32) {
    if (release.peer_credits[i] != nullptr) store_relaxed_system(release.peer_credits[i], 1);
  }
  // This wait comes after the credits, for which the peers' copies may wait.
  if (!kNoSent && release.sent != nullptr && lane_id() == 0) {
    wait_signal(release.sent, 1, limit.rank * limit.senders.chunks_per_rank, limit);
    *release.sent = 0;
  }
}

}  // namespace agmm
