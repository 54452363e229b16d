#include "sync/signals.hpp"

#include <cxxabi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_map>

namespace agmm {
namespace {

// torch's process groups have this default too.
constexpr double kDefaultTimeoutS = static_cast<double>(kDefaultLimitNs) * 1e-9;
// No call that goes well takes so long, and who looks at a job that stands still wants to know.
constexpr double kDefaultWarnS = 30.0;
// What the end of a process may be put off for the sake of its message.
constexpr std::chrono::seconds kLongestLookup{5};
// More kinds of calls than a program makes; kept small because nobody removes them.
constexpr size_t kMostNotedCalls = 4096;
// A wait spins, then lets others run, then sleeps, so that eight ranks on two cores get on. A
// choice, not tuned: the CPU backend is for tests.
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

std::string going_on(double limit_s) {
  return format("; waiting until it is %g s (AGMM_TIMEOUT_S)", limit_s);
}

std::string has_waited(double waited_s) {
  const std::time_t since = std::time(nullptr) - static_cast<std::time_t>(waited_s);
  std::tm local{};
  char text[40] = "?";
  if (::localtime_r(&since, &local) != nullptr) {
    std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &local);
  }
  return format(" has waited %.1f s, since %s, for", waited_s, text);
}

std::string name_of_chunk(int rank, int source, int64_t chunk) {
  // A GPU awaits its own shard too: staged, where a tile has rows of another, and at the end sent.
  bool const is_own = rank >= 0 && source == rank;
  auto const number = static_cast<long long>(chunk);
  return is_own ? format(" its own chunk %lld to be staged or sent", number)
                : format(" chunk %lld", number) + origin(source);
}

std::string what_of_chunk(int rank, int source, int64_t chunk, uint32_t seen, uint32_t wanted) {
  return name_of_chunk(rank, source, chunk) + format(": signal is %u, wanted %u", seen, wanted);
}

std::string name_of_buffer(int peer, int64_t slot) {
  return format(" buffer %lld of rank %d to be free", static_cast<long long>(slot), peer);
}

std::string what_of_credit(int peer, int slot, uint32_t seen) {
  return name_of_buffer(peer, slot) + format(": credit is %u, wanted 1", seen);
}

double seconds_of(const char* name, double fallback, bool zero_too) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return fallback;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  const bool in_range = std::isfinite(seconds) && (seconds > 0 || (zero_too && seconds == 0));
  if (end == text || *end != '\0' || !in_range) {
    throw std::invalid_argument(std::string(name) + ": found '" + text +
                                "', wanted a number of seconds " + (zero_too ? ">= 0" : "> 0"));
  }
  return seconds;
}

// Never destroyed: threads that end the process use them whatever has been torn down.
struct Calls {
  std::mutex mutex;
  std::unordered_map<uint32_t, std::string> noted;
  std::shared_ptr<const CallLookup> lookup;
  std::shared_ptr<const LateListener> listener;
  std::atomic<bool> listening{false};
};
Calls& calls() {
  static Calls* const found = new Calls;
  return *found;
}

// What the two ranks called; empty where that cannot be found out in time.
std::pair<std::string, std::string> look_up(int rank, int source, uint32_t wanted) {
  std::shared_ptr<const CallLookup> lookup;
  std::string own;
  {
    const std::lock_guard<std::mutex> lock(calls().mutex);
    lookup = calls().lookup;
    const auto found = calls().noted.find(wanted);
    if (found != calls().noted.end()) own = found->second;
  }
  if (!lookup) return {own, ""};
  auto const promise = std::make_shared<std::promise<std::pair<std::string, std::string>>>();
  auto answer = promise->get_future();
  // A thread of its own, since it may never come back: it may want a lock that this process holds.
  std::thread([promise, lookup, rank, source, wanted, own] {
    try {
      promise->set_value((*lookup)(rank, source, wanted, own));
    } catch (...) {
      promise->set_value({own, ""});
    }
  }).detach();
  if (answer.wait_for(kLongestLookup) != std::future_status::ready) return {own, ""};
  return answer.get();
}

}  // namespace

double timeout_seconds() { return seconds_of("AGMM_TIMEOUT_S", kDefaultTimeoutS, false); }

double warn_seconds() { return seconds_of("AGMM_WARN_S", kDefaultWarnS, true); }

std::string timeout_message(int rank, int source, int64_t chunk, uint32_t seen, uint32_t wanted,
                            double waited_s, double limit_s) {
  return subject(rank) + format(" waited %.1f s for", waited_s) +
         what_of_chunk(rank, source, chunk, seen, wanted) + ending(limit_s);
}

std::string credit_timeout_message(int rank, int peer, int slot, uint32_t seen, double waited_s,
                                   double limit_s) {
  return subject(rank) + format(" waited %.1f s for", waited_s) + what_of_credit(peer, slot, seen) +
         ending(limit_s);
}

std::string waiting_message(int rank, int source, int64_t chunk, uint32_t seen, uint32_t wanted,
                            double waited_s, double limit_s) {
  return subject(rank) + has_waited(waited_s) + what_of_chunk(rank, source, chunk, seen, wanted) +
         going_on(limit_s);
}

std::string credit_waiting_message(int rank, int peer, int slot, uint32_t seen, double waited_s,
                                   double limit_s) {
  return subject(rank) + has_waited(waited_s) + what_of_credit(peer, slot, seen) +
         going_on(limit_s);
}

std::string late_message(int rank, int source, int64_t chunk, double waited_s, double limit_s) {
  return subject(rank) + has_waited(waited_s) + name_of_chunk(rank, source, chunk) +
         going_on(limit_s);
}

std::string late_credit_message(int rank, int peer, double waited_s, double limit_s) {
  return subject(rank) + has_waited(waited_s) + format(" a buffer of rank %d to be free", peer) +
         going_on(limit_s);
}

std::string late_ranks_message(int rank, const std::vector<int>& sources, double waited_s,
                               double limit_s) {
  std::string who = sources.size() == 1 ? " rank" : " ranks";
  for (std::size_t i = 0; i < sources.size(); ++i) {
    who += (i == 0 ? " " : ", ") + std::to_string(sources[i]);
  }
  return subject(rank) + has_waited(waited_s) + who + going_on(limit_s);
}

std::string mismatch_message(int rank, int source, int64_t chunk, uint32_t seen, uint32_t wanted) {
  const auto [own, theirs] = look_up(rank, source, wanted);
  const std::string tags = format(": chunk %lld", static_cast<long long>(chunk)) + origin(source) +
                           format(" carries tag 0x%x but this rank expects 0x%x", seen, wanted);
  std::string calls = ": the ranks made different calls";
  if (!own.empty()) calls += "; this rank: " + own;
  if (!theirs.empty()) calls += "; rank " + std::to_string(source) + ": " + theirs;
  return subject(rank) + tags + calls + "; ending the process";
}

void note_call(uint32_t tag, std::string what) {
  const std::lock_guard<std::mutex> lock(calls().mutex);
  if (calls().noted.size() >= kMostNotedCalls) calls().noted.clear();
  calls().noted[tag] = std::move(what);
}

void set_call_lookup(CallLookup lookup) {
  // Shared: a copy of it may want a lock, too.
  auto shared = std::make_shared<const CallLookup>(std::move(lookup));
  const std::lock_guard<std::mutex> lock(calls().mutex);
  calls().lookup.swap(shared);  // the old one goes without the lock
}

void set_late_listener(LateListener listener) {
  auto shared = std::make_shared<const LateListener>(std::move(listener));
  const std::lock_guard<std::mutex> lock(calls().mutex);
  calls().listener.swap(shared);
}

void tell_of_late_wait(int rank, bool without_elements) {
  std::shared_ptr<const LateListener> listener;
  {
    const std::lock_guard<std::mutex> lock(calls().mutex);
    listener = calls().listener;
  }
  if (!listener || calls().listening.exchange(true)) return;
  // The listener gets a thread of its own, for it may want a lock that this process holds.
  std::thread([listener, rank, without_elements] {
    try {
      (*listener)(rank, without_elements);
    } catch (abi::__forced_unwind&) {  // Python ends threads that come while it shuts down
      throw;
    } catch (...) {  // it is told again in a second
    }
    calls().listening.store(false);
  }).detach();
}

void write_line(const std::string& message) noexcept {
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
}

void end_process(const std::string& message) {
  static std::atomic_flag taken = ATOMIC_FLAG_INIT;
  if (taken.test_and_set()) {
    for (;;) ::pause();
  }
  write_line(message);
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

bool Wait::warning_due() {
  if (warned_ || warn_s_ <= 0 || waited_s() < warn_s_) return false;
  warned_ = true;
  static std::atomic<int64_t> last_ns{std::numeric_limits<int64_t>::min() / 2};
  const int64_t now_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
  int64_t before = last_ns.load();
  return static_cast<double>(now_ns - before) * 1e-9 >= warn_s_ &&
         last_ns.compare_exchange_strong(before, now_ns);
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
