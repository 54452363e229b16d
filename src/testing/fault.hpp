// Test builds: a deliberate fault (AGMM_FAULT), which the stress test has to find, delays
// (AGMM_STRESS_DELAYS) and a link that is not there (AGMM_VIRTUAL_LINK). CMakeLists.txt defines
// these; a build for use has neither.
#pragma once

#include <string_view>

#ifndef AGMM_FAULT
#define AGMM_FAULT ""
#endif
#ifndef AGMM_STRESS_DELAYS
#define AGMM_STRESS_DELAYS 0
#endif
#ifndef AGMM_VIRTUAL_LINK
#define AGMM_VIRTUAL_LINK 0
#endif

namespace agmm {

inline constexpr std::string_view kFault = AGMM_FAULT;
inline constexpr bool kNoFence = kFault == "no_fence";          // a signal without its fence
inline constexpr bool kSignalFirst = kFault == "signal_first";  // signals before the rows
inline constexpr bool kNoCredit = kFault == "no_credit";        // data awaits no credit
inline constexpr bool kNoWait = kFault == "no_wait";            // loads await no signal
inline constexpr bool kNoSent = kFault == "no_sent";            // ends before the shard is sent
inline constexpr bool kReadSignal = kFault == "read_signal";    // a tile's signal before its end
inline constexpr bool kNoParts = kFault == "no_parts";          // sums are added before they come
inline constexpr bool kEarlySum = kFault == "early_sum";        // a split of K counts unstored
inline constexpr bool kOneSlot = kFault == "one_slot";          // collectives do not take turns
static_assert(kEarlySum || kOneSlot || kReadSignal || kNoParts || kFault.empty() || kNoFence ||
              kSignalFirst || kNoCredit || kNoWait || kNoSent);

inline constexpr bool kStressDelays = AGMM_STRESS_DELAYS != 0;

/// GB/s of a link that one GPU imagines, so that what it sends to itself takes as long as to
/// another; 0: none.
inline constexpr int kVirtualLinkGBs = AGMM_VIRTUAL_LINK;

}  // namespace agmm
