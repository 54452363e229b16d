// How a kernel sees that the chunks of a matrix that is still on its way have arrived.
#pragma once

#include <cstdint>

namespace agmm {

/// What a waiting kernel has to know about the ranks that write its signals: which rank a chunk
/// comes from, and which values besides the ready value a signal may hold.
struct Senders {
  // The tags of the source ranks, nonzero words, one per chunk, where this rank writes the signals
  // itself. Null where the signals carry the tags.
  uint32_t const* tags = nullptr;
  // The source rank of a chunk is chunk / chunks_per_rank; 0 means that it is unknown. It is named
  // in the message when a wait passes its limit.
  int32_t chunks_per_rank = 1;
  // How many low bits of a signal count the CTAs of the source that have added to it; one of them
  // adds the tag above these bits. 0: the signal is written once.
  uint32_t count_bits = 0;
  // Whether a nonzero value other than the wanted one ends the wait at once, since it says that the
  // source rank called with another problem. Otherwise every value but the wanted one means "not
  // ready".
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
