// The end of a call on the consumer's side: signals are reset, buffers are given back.
#pragma once

#include <cstdint>

namespace agmm {

/// Tells the peers that the gathered A has been read; done by the last to finish of the producer
/// warps, whose loads have landed, and of those that push, which have no item left to take.
///
/// Invariant: a peer overwrites a buffer only after its credit; the credit comes after the reset of
/// the signals (all lanes' writes, __syncwarp, each lane's system fence), which comes after every
/// CTA's last load of A has landed in shared memory (the counter, acquire-release, device scope,
/// carried to the other lanes by __syncwarp). So no load is overtaken by a write,
/// and no signal of the next call is lost to this call's reset. The words of the push are reset
/// after the last warp has looked at them. Scales of fp8 are read later than A, by the consumers'
/// epilogue: there operations on the stream, or a kernel, behind this one do all this in the same
/// order (AllGather::release).
struct Release {
  uint32_t* signals = nullptr;  // reset to 0; null: nothing is released
  int32_t signal_count = 0;
  // [0] counts those that are done, the other `counter_count` - 1 belong to the transport; all
  // are reset to 0.
  uint32_t* counters = nullptr;
  int32_t counter_count = 1;
  uint32_t* const* peer_credits = nullptr;  // one word in each peer's memory, set to 1; may be null
  int32_t peer_count = 0;
  // Written with 1 when a transport beside the kernel has sent all of this rank's shard; awaited,
  // so that the kernel does not end before the shard may be overwritten, and reset. Or null.
  uint32_t* sent = nullptr;
};

}  // namespace agmm
