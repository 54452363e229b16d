#include "agmm/signals.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>

namespace agmm {
namespace {

constexpr double kDefaultTimeoutS = 60.0;
constexpr int kSpins = 64;
constexpr int kYields = 64;
constexpr int kLongestSleepUs = 100;

template <class... Args>
std::string format(const char* pattern, Args... args) {
  char text[320];
  std::snprintf(text, sizeof text, pattern, args...);
  return text;
}

std::string subject(int rank) { return rank < 0 ? "agmm:" : format("agmm: rank %d", rank); }

std::string origin(int source) { return source < 0 ? "" : format(" from rank %d", source); }

std::string ending(double limit_s) {
  return format("; ending the process (AGMM_TIMEOUT_S=%g)", limit_s);
}

}  // namespace

double timeout_seconds() {
  const char* text = std::getenv("AGMM_TIMEOUT_S");
  if (text == nullptr) return kDefaultTimeoutS;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (end == text || *end != '\0' || !std::isfinite(seconds) || seconds <= 0) {
    throw std::invalid_argument(std::string("AGMM_TIMEOUT_S: found '") + text +
                                "', wanted a number of seconds > 0");
  }
  return seconds;
}

std::string timeout_message(int rank, int source, int64_t chunk, uint32_t seen, uint32_t wanted,
                            double waited_s, double limit_s) {
  // A GPU awaits its own shard too: staged, where a tile has rows of another, and at the end sent.
  bool const is_own = rank >= 0 && source == rank;
  auto const number = static_cast<long long>(chunk);
  std::string const what = is_own ? format(" its own chunk %lld to be staged or sent", number)
                                  : format(" chunk %lld", number) + origin(source);
  return subject(rank) + format(" waited %.1f s for", waited_s) + what +
         format(": signal is %u, wanted %u", seen, wanted) + ending(limit_s);
}

std::string credit_timeout_message(int rank, int peer, int slot, uint32_t seen, double waited_s,
                                   double limit_s) {
  return subject(rank) +
         format(" waited %.1f s for gather buffer %d of rank %d to be free: credit is %u, wanted 1",
                waited_s, slot, peer, seen) +
         ending(limit_s);
}

std::string mismatch_message(int rank, int source, int64_t chunk, uint32_t seen, uint32_t wanted) {
  return subject(rank) + format(": chunk %lld", static_cast<long long>(chunk)) + origin(source) +
         format(
             " carries tag 0x%x but this rank expects 0x%x: the ranks called all_gather_matmul "
             "with different shapes or dtypes; ending the process",
             seen, wanted);
}

void end_process(const std::string& message) {
  static std::atomic_flag taken = ATOMIC_FLAG_INIT;
  if (taken.test_and_set()) {
    for (;;) ::pause();
  }
  // One write call, so that the lines of several ranks on one terminal do not mix.
  const std::string line = message + "\n";
  const char* rest = line.data();
  size_t left = line.size();
  while (left > 0) {
    const ssize_t written = ::write(STDERR_FILENO, rest, left);
    if (written <= 0) break;
    rest += written;
    left -= static_cast<size_t>(written);
  }
  std::_Exit(kTimeoutExitCode);
}

uint32_t call_tag(int64_t m_local, int64_t k, std::string_view dtype, bool return_a) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, 64 bits
  const auto add = [&hash](uint64_t byte) { hash = (hash ^ byte) * 0x100000001b3u; };
  for (const int64_t value : {m_local, k}) {
    for (int shift = 0; shift < 64; shift += 8) {
      add((static_cast<uint64_t>(value) >> shift) & 0xff);
    }
  }
  for (const char letter : dtype) add(static_cast<unsigned char>(letter));
  add(return_a ? 1 : 0);
  const uint32_t tag = static_cast<uint32_t>(hash ^ (hash >> 32));
  return tag == 0 ? 1 : tag;
}

void Backoff::pause() {
  const int look = looks_++;
  if (look < kSpins) return;
  if (look < kSpins + kYields) {
    ::sched_yield();
    return;
  }
  const int doublings = std::min(look - kSpins - kYields, 7);
  looks_ = std::min(looks_, kSpins + kYields + 8);
  std::this_thread::sleep_for(std::chrono::microseconds(std::min(1 << doublings, kLongestSleepUs)));
}

}  // namespace agmm
