// How the chunks of a matrix that is still on its way are seen to arrive.
#pragma once

#include <cstdint>

namespace agmm {

/// Who writes signals, and what else than the ready value they may hold.
struct Senders {
  // Nonzero words with the sources' own tags, one per chunk, where the signals are written by this
  // rank itself; null where the signals carry the tags.
  uint32_t const* tags = nullptr;
  // Source rank of a chunk = chunk / chunks_per_rank; 0: unknown. For the message when a wait
  // passes its limit.
  int32_t chunks_per_rank = 1;
  // Where several CTAs of the source add to a signal: the low bits count them, and the tag above
  // is added by one of them. 0: the signal is written once.
  uint32_t count_bits = 0;
  // A nonzero value other than the wanted one: the source rank called with another problem, and the
  // wait ends at once. Without it every value but the wanted one means "not ready".
  bool mismatch_is_fatal = false;
};

/// A is cut into chunks_m x chunks_k chunks; chunk (i, j) may be read once
/// signals[i * chunks_k + j] == ready_value, written with release semantics after its data.
struct Arrival {
  uint32_t const* signals = nullptr;  // device memory; null: all of A is ready
  uint32_t ready_value = 1;
  int32_t chunks_m = 1;
  int32_t chunks_k = 1;
  int32_t pivot = 0;  // the first row of chunks in a ring of them (not of KernelConfig::across)
  Senders senders{};
};

}  // namespace agmm
