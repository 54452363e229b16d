// The CPU backend's symmetric memory: one POSIX shared-memory segment per rank, a thread that
// writes into the peers' slots, and the waits of the consumer.
//
// Both directions have one protocol. On the way in (all-gather) a rank pushes its shard to every
// peer, and a slot is the gathered A. On the way out (reduce-scatter) it sends each peer the part
// of the sum that this one owns, and a slot holds the parts of all peers (order/scatter_order.hpp).
//
// The protocol. Each rank's segment holds two slots (calls, and the bands of a reduce-scatter,
// alternate between them) and, per slot,
//   signals[source * chunks_per_shard + i]  written by rank `source`, reset by the segment's owner
//   credits[peer]                           set to 1 by rank `peer`, taken by the segment's owner
// Invariants, for ranks r (consumer) and s (sender), s != r, and one slot:
//   I1  Exactly one of three holds at any time: s's segment has credits[r] == 1 (the buffer of r is
//       free for s); s has taken that credit and is writing; s has written every chunk and
//       signalled it, and r has not yet released the slot.
//   I2  s writes into r's buffer or signals only between taking the credit and its last signal; r
//       reads them or writes the signals only between s's signal and giving the credit. So each
//       word has one writer at any time and no word needs a read-modify-write.
//   I3  Data before signal, release; signal before data, acquire. Reset of the signals before the
//       credit, release; credit before the next write, acquire.
//   I4  A wait for the credit of call n needs only that the peers finished call n - 2, and that
//       needs only pushes queued before: by induction on n no wait waits for itself.
// A signal's value is the call's tag (see call_tag), so a rank that takes part with another shape
// is found out by the first chunk that arrives.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sync/signals.hpp"

namespace agmm {

class SharedSegment;

class CpuWorkspace {
 public:
  static constexpr int kSlots = 2;  // as SlotRing has

  // Creates this rank's segment, with two slots of `slot_bytes`, under a fresh name. Its slots have
  // memory only after take_memory(). Also removes segments left behind by processes that no longer
  // exist. Throws std::invalid_argument for arguments out of range and std::runtime_error when the
  // segment cannot be had.
  CpuWorkspace(int rank, int world_size, int64_t slot_bytes, int chunks_per_shard,
               double timeout_s);
  ~CpuWorkspace();
  CpuWorkspace(const CpuWorkspace&) = delete;
  CpuWorkspace& operator=(const CpuWorkspace&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int chunks_per_shard() const { return chunks_per_shard_; }
  const std::string& name() const { return name_; }

  double timeout_s() const { return timeout_s_.load(); }
  void set_timeout_s(double seconds);
  // See warn_seconds(); 0 at first.
  double warn_s() const { return warn_s_.load(); }
  void set_warn_s(double seconds) { warn_s_.store(seconds); }

  // Maps the segments of all ranks, `names` in rank order, and starts the copy thread.
  void connect(const std::vector<std::string>& names);
  // Called once every rank has returned from connect(): removes the segment's name, then takes the
  // memory of the slots, which so lives no longer than the last rank that has mapped it. Throws
  // std::runtime_error when there is too little.
  void take_memory();
  // Removes the name, stops the copy thread (what has not found its credit is dropped) and unmaps.
  // No other thread may be in a call; end_waits() gets those out that wait.
  void close() noexcept;
  // From now on wait_chunk() and wait_pushed() throw std::runtime_error, also those under way, by
  // the end of their slice. A thread that waits while this process comes to its end needs it.
  void end_waits() noexcept { waits_ended_.store(true); }

  char* slot(int slot) const;
  uint32_t* signals(int slot) const;

  // Hands one shard to the copy thread and returns at once: for each peer, nearest consumer first,
  // it takes the credit, then copies `shard_bytes` in pieces of `chunk_bytes` to offset
  // rank * shard_bytes of the peer's slot and signals each piece with `tag`. Where there are fewer
  // pieces than chunks_per_shard the remaining chunks are empty, and signalled all the same.
  // `shard` must stay unchanged until wait_pushed() has returned true.
  void push(int slot, const void* shard, int64_t shard_bytes, int64_t chunk_bytes, uint32_t tag);

  // Has the copy thread take the credit of every peer's slot, before the sends that follow.
  void take_credits(int slot);
  // Hands one piece of this rank's part of the owner's sum to the copy thread and returns at once:
  // it copies the piece to `offset` bytes into the part, parts of `part_bytes` each lying in the
  // owner's slot by part_place(), and signals it with `tag`. After take_credits(), and each of the
  // chunks_per_shard pieces once for each owner; they may be empty. `piece` must stay unchanged
  // until wait_pushed() has returned true.
  void send(int slot, int owner, int index, const void* piece, int64_t piece_bytes,
            int64_t part_bytes, int64_t offset, uint32_t tag);

  // True when the chunk's signal carries `tag`; false when `slice` is over before. Ends the process
  // when `wait` has passed its limit or the signal carries another call's tag.
  bool wait_chunk(Wait& wait, int slot, int chunk, uint32_t tag,
                  std::chrono::nanoseconds slice) const;
  // True when every push and send so far is complete; false when `slice` is over before. The copy
  // thread holds the limit.
  bool wait_pushed(std::chrono::nanoseconds slice);

  // The consumer is done with the slot: resets its signals and gives a credit to every peer.
  void release(int slot);

  // For each chunk of the slot, when the sender signalled it (CLOCK_MONOTONIC, ns). Valid between
  // the wait for the chunks and release(); 0 for the rank's own.
  std::vector<int64_t> arrival_ns(int slot) const;

  // Delays every chunk by a random time up to `us` microseconds before it is pushed.
  void set_push_delay_us(int us);

 private:
  class CopyThread;

  void require_open(const char* what) const;
  void require_connected(const char* what) const;
  void require_slot(int slot) const;
  void require_waits() const;
  void write(int slot, int peer, int64_t at, const char* from, int64_t bytes, int index,
             uint32_t tag, CopyThread& thread) const;
  void take_credit(int slot, int peer, const CopyThread& thread) const;

  const int rank_;
  const int world_size_;
  const int64_t slot_bytes_;
  const int chunks_per_shard_;
  std::atomic<double> timeout_s_;
  std::atomic<double> warn_s_;
  std::atomic<bool> waits_ended_{false};
  const pid_t owner_;  // a forked child must not touch the thread that it does not have
  std::string name_;
  std::vector<std::unique_ptr<SharedSegment>> segments_;  // by rank; own from the start
  std::unique_ptr<CopyThread> thread_;
};

// Waits until the word is `wanted`, whatever else it holds before. As CpuWorkspace::wait_chunk.
bool wait_signal(Wait& wait, const uint32_t* word, uint32_t wanted, int rank, int source,
                 int64_t chunk, std::chrono::nanoseconds slice);

}  // namespace agmm
