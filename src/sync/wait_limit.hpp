// What a wait on the device has: its limit, and where it reports that it passed it.
#pragma once

#include <cstdint>

#include "agmm/arrival.hpp"

namespace agmm {

struct WaitReport;

/// Where the kernels of a device report a wait that passed its limit.
struct ReportPlace {
  WaitReport volatile* report = nullptr;  // pinned host memory, of this device alone
  uint32_t* report_lock = nullptr;        // device memory, 0 until one thread has reported
  uint32_t late = 0;                      // LateWait::what of chunk 0 of who waits
};

/// How a wait ends when the signal does not come.
struct WaitLimit {
  ReportPlace place{};
  uint64_t limit_ns = 0;
  Senders senders{};
  int32_t rank = 0;
};

}  // namespace agmm
