// Test builds: a deliberate fault (AGMM_FAULT), which the stress test has to find, and delays
// (AGMM_STRESS_DELAYS). CMakeLists.txt defines these; a build for use has neither.
#pragma once

#include <string_view>

#ifndef AGMM_FAULT
#define AGMM_FAULT ""
#endif
#ifndef AGMM_STRESS_DELAYS
#define AGMM_STRESS_DELAYS 0
#endif

namespace agmm {

inline constexpr std::string_view kFault = AGMM_FAULT;
inline constexpr bool kNoFence = kFault == "no_fence";          // a signal without its fence
inline constexpr bool kSignalFirst = kFault == "signal_first";  // signals before the rows
inline constexpr bool kNoCredit = kFault == "no_credit";        // SM push awaits no credit
inline constexpr bool kNoWait = kFault == "no_wait";            // loads await no signal
inline constexpr bool kNoSent = kFault == "no_sent";            // ends before the shard is sent
static_assert(kFault.empty() || kNoFence || kSignalFirst || kNoCredit || kNoWait || kNoSent);

inline constexpr bool kStressDelays = AGMM_STRESS_DELAYS != 0;

}  // namespace agmm
