// Signals: 32-bit words that say "this chunk is here" (or, as credits, "this buffer is free"), and
// the rules for waiting on them. Host side, no CUDA and no Python; the CUDA code uses the messages,
// the limit and the tag from here so that both backends say the same thing.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agmm/limits.hpp"

namespace agmm {

// One line for a wait for a chunk that passed its limit. Pass rank < 0 or source < 0 where unknown.
std::string timeout_message(int rank, int source, int64_t chunk, uint32_t seen, uint32_t wanted,
                            double waited_s, double limit_s);

// One line for a wait for the credit of `peer`'s gather buffer `slot` that passed its limit.
std::string credit_timeout_message(int rank, int peer, int slot, uint32_t seen, double waited_s,
                                   double limit_s);

// The two lines for a wait that goes on: they say since when, by this host's clock.
std::string waiting_message(int rank, int source, int64_t chunk, uint32_t seen, uint32_t wanted,
                            double waited_s, double limit_s);
std::string credit_waiting_message(int rank, int peer, int slot, uint32_t seen, double waited_s,
                                   double limit_s);

// The lines for waits that go on on a GPU, which do not say what they see.
std::string late_message(int rank, int source, int64_t chunk, double waited_s, double limit_s);
std::string late_credit_message(int rank, int peer, double waited_s, double limit_s);
std::string late_ranks_message(int rank, const std::vector<int>& sources, double waited_s,
                               double limit_s);

// One line for a chunk whose signal carries the tag of a different call. Where calls can be looked
// up (set_call_lookup) it names what both ranks called, else the two tags.
std::string mismatch_message(int rank, int source, int64_t chunk, uint32_t seen, uint32_t wanted);

// Keeps what the calls are whose signals carry `tag`, for mismatch_message. Not on the hot path:
// where a kind of call is first prepared.
void note_call(uint32_t tag, std::string what);

// A lookup goes from (rank, source, this rank's tag, what note_call was told of it, or "") to what
// the two ranks called; empty strings where it is not known. It may wait for the other rank for a
// few seconds; longer and mismatch_message goes without. It is called on a thread of its own.
using CallLookup =
    std::function<std::pair<std::string, std::string>(int, int, uint32_t, const std::string&)>;
void set_call_lookup(CallLookup lookup);

// Told each second of a kernel that waits: the rank that waits, and whether its call has no
// elements. It is called on a thread of its own, one at a time.
using LateListener = std::function<void(int rank, bool without_elements)>;
void set_late_listener(LateListener listener);
void tell_of_late_wait(int rank, bool without_elements);

// Writes `message` as one line to stderr, in one piece.
void write_line(const std::string& message) noexcept;

// Writes `message` as one line to stderr and ends the process with kTimeoutExitCode. Runs no atexit
// handlers: other threads may be stuck in the very wait that failed. When several threads call it,
// only the first one's line is written.
[[noreturn]] void end_process(const std::string& message);

// The value that signals carry in one fused call: a hash, never 0, of what all ranks have to agree
// on. `dtype` is torch's name without the module, such as "bfloat16".
uint32_t call_tag(int64_t m_local, int64_t k, std::string_view dtype, bool return_a);

// The words lie in memory that other processes write, so they are plain uint32_t and every access
// goes through these two. Release: what was written before is visible to the one who acquires it.
inline uint32_t load_acquire(const uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
inline void store_release(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

// What a waiting thread does between two looks: spins briefly, then gives up its time slice, then
// sleeps, doubling up to 100 µs, so that more ranks than cores still make progress.
class Backoff {
 public:
  void pause();

 private:
  int looks_ = 0;
};

// One wait with a limit, done in slices so that the caller can look after other things (Python
// signals, a stop request) in between. Of one thread.
class Wait {
 public:
  using Clock = std::chrono::steady_clock;

  // warn_s: see warn_seconds().
  Wait(double limit_s, double warn_s) : limit_s_(limit_s), warn_s_(warn_s), start_(Clock::now()) {}

  // Calls `ready` until it returns true (then true), or until `slice` is over or the limit has
  // passed (then false).
  template <class Ready>
  bool poll(const Ready& ready, std::chrono::nanoseconds slice) const {
    if (ready()) return true;
    const Clock::time_point slice_end = Clock::now() + slice;
    Backoff backoff;
    while (!ready()) {
      if (Clock::now() >= slice_end || expired()) return false;
      backoff.pause();
    }
    return true;
  }

  // This poll() is all that a wait is: past the limit the process ends with a message, and when a
  // warning is due it is written. `message(ends)` makes either from what is seen then.
  template <class Ready, class Message>
  bool poll(const Ready& ready, std::chrono::nanoseconds slice, const Message& message) {
    if (poll(ready, slice) || ready()) return true;
    if (expired()) end_process(message(true));
    if (warning_due()) write_line(message(false));
    return false;
  }

  double limit_s() const { return limit_s_; }
  double waited_s() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  bool expired() const { return waited_s() >= limit_s_; }

  // Whether it is time to say what this wait is for: true once, and for the first one only of
  // several that wait in this process at a time.
  bool warning_due();

 private:
  double limit_s_;
  double warn_s_;
  bool warned_ = false;
  Clock::time_point start_;
};

}  // namespace agmm
