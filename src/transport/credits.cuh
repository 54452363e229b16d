// How the kernels of the transports wait for the buffers of the peers.
#pragma once

#include "sync/device_wait.hpp"

namespace agmm {

/// Returns when `credits[peer]` is 1, acquired at system scope; reports and stops past the limit.
__device__ inline void wait_for_credit(uint32_t const* credits, int peer, int slot,
                                       WaitLimit const& limit) {
  uint64_t start = 0;
  for (;;) {
    uint32_t const seen = load_acquire_system(credits + peer);
    if (seen == 1) return;
    uint64_t const now = global_timer_ns();
    if (start == 0) start = now;
    if (now - start > limit.limit_ns) {
      report_and_stop(limit, WaitReport::Credit, peer, slot, seen, 1, now - start);
    }
  }
}

}  // namespace agmm
