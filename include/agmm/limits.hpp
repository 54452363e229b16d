// The limits of waits, which the environment sets.
#pragma once

#include <cstdint>

namespace agmm {

/// Limit of every wait where nobody says otherwise.
constexpr uint64_t kDefaultLimitNs = 600'000'000'000ull;

/// Exit status of a process that ends because a wait passed its limit, as timeout(1) uses it.
constexpr int kTimeoutExitCode = 124;

/// Limit of every wait in seconds: the environment variable AGMM_TIMEOUT_S, read at each call, or
/// 600 where it is not set or empty. Throws std::invalid_argument when it is anything but a finite
/// number > 0.
double timeout_seconds();

/// After so many seconds a wait says on stderr what it waits for: AGMM_WARN_S, or 30; 0: never. As
/// timeout_seconds().
double warn_seconds();

}  // namespace agmm
