// The limits of waits, which the environment sets.
#pragma once

#include <cstdint>

namespace agmm {

/// The limit of a wait where its caller does not set one.
constexpr uint64_t kDefaultLimitNs = 600'000'000'000ull;

/// The exit status of a process that ends because a wait passed its limit; timeout(1) uses the same
/// one.
constexpr int kTimeoutExitCode = 124;

/// The limit of every wait in seconds: the environment variable AGMM_TIMEOUT_S, read at each call,
/// or 600 where it is not set or empty. Throws std::invalid_argument when it is anything but a
/// finite number > 0.
double timeout_seconds();

/// The seconds after which a wait says on stderr what it waits for: the environment variable
/// AGMM_WARN_S, or 30 where it is not set or empty; 0 means never. Throws std::invalid_argument
/// when it is anything but a finite number >= 0.
double warn_seconds();

}  // namespace agmm
