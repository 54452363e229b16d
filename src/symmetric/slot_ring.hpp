// Which gather buffer a call takes.
#pragma once

#include <array>
#include <cstdint>

namespace agmm {

/// Calls take the slots in turn. The ranks have to agree on each call's slot, so eager calls count
/// by themselves and every stream capture from slot 0: a rank that captured more than another, in
/// an attempt that failed say, is still in step. Two calls that follow one another may have the
/// same slot; that costs overlap and nothing else (all_gather.hpp, invariant 3).
///
/// A capture's end is not seen, so the captures of the last calls are remembered.
class SlotRing {
 public:
  // With two, a call writes while the one before is still read; a third would take half the memory
  // more.
  static constexpr int kSlots = 2;
  // Captures that may be under way at once. A choice: more than one is rare. Where there are more,
  // the oldest is forgotten and begins with slot 0 again.
  static constexpr int kCaptures = 4;
  static constexpr int kSequences = 1 + kCaptures;
  static constexpr int kNone = -1;

  /// What a call belongs to: 0 for eager calls, else the id of the capture that it is in.
  using Capture = unsigned long long;

  int next_slot(Capture capture) const {
    int const i = find(capture);
    return i == kNone ? 0 : sequences_[i].next;
  }

  /// Whether a call of the sequence has begun and not ended.
  bool is_broken(Capture capture) const {
    int const i = find(capture);
    return i != kNone && sequences_[i].in_call;
  }

  /// Which sequence of calls these are, 0 for eager ones; kNone before the first call.
  int find(Capture capture) const {
    for (int i = 0; i < kSequences; ++i) {
      if (sequences_[i].last_call != 0 && sequences_[i].capture == capture) return i;
    }
    return kNone;
  }

  /// The sequence that begin() will return.
  int place(Capture capture) const {
    int const i = find(capture);
    if (i != kNone) return i;
    return capture == 0 ? 0 : oldest_capture();
  }

  /// A call begins and takes the next slot. Returns its sequence.
  int begin(Capture capture) {
    int const i = place(capture);
    if (find(capture) == kNone) {
      sequences_[i] = {};
      sequences_[i].capture = capture;
    }
    Sequence& sequence = sequences_[i];
    sequence.last_call = ++calls_;
    sequence.in_call = true;
    sequence.next = (sequence.next + 1) % kSlots;
    return i;
  }

  void end(Capture capture) { sequences_[find(capture)].in_call = false; }

 private:
  struct Sequence {
    Capture capture = 0;
    uint64_t last_call = 0;  // 0: none
    int next = 0;
    bool in_call = false;
  };

  int oldest_capture() const {
    int oldest = 1;
    for (int i = 2; i < kSequences; ++i) {
      if (sequences_[i].last_call < sequences_[oldest].last_call) oldest = i;
    }
    return oldest;
  }

  std::array<Sequence, kSequences> sequences_{};
  uint64_t calls_ = 0;
};

}  // namespace agmm
