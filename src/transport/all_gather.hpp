// Progress-aware all-gather on symmetric memory: moves shards between GPUs chunk by chunk and
// signals each arrival. It knows nothing of the matmul that consumes the chunks.
//
// Timeline of one call on rank r (w ranks), push:
//   main stream   fork ------------------------------ consumer kernel (waits for signals, sent)
//   copy stream        take credits | -> r-1 | signal | -> r-2 | signal | ... | sent
// where tiles are shared with a neighbour, a stage kernel comes before the consumer: it copies the
// own boundary rows into the own slot and signals. Pull, when the caller wants A:
//   copy stream        stage kernel | wait tag of r+1 | copy r+1 | signal | wait tag of r+2 | ...
// where the stage kernel takes the credits, copies the own shard to where peers read it and into
// the caller's A, tags all peers and signals; the consumer starts after it.
//
// SM push, for short shards: spare warps of the consumer's CTAs write the shard, column chunk by
// column chunk:
//   main stream   consumer kernel (waits for signals) ----------------------------------------
//     its warps     credits | chunk 0 -> r-1, r-2, ... | signals | chunk 1 -> ... |
//
// Copies inside one GPU are kernels, the driver's too: beside a consumer that fills the GPU and
// spins they never run (measured), so the consumer starts after the stage kernel, and leaves room
// for copies where ranks share a GPU, unless it splits K. Copies between GPUs are the copy engine's
// and do.
//
// Protocol. Every workspace has two gather buffers (slots) that calls use in turn. Per slot, words
// in symmetric memory, one per source or peer p:
//   signals[p]  p's chunk is here. Push: written by p after its data. Pull: by this rank's own copy
//               stream after its copy from p. The own one: by the stage kernel. SM push: one per
//               column chunk, to which every part of the chunk adds.
//   tags[p]     pull only, written by p: its shard is staged, and what problem it is for.
//   credits[p]  p's slot is free for this rank. 1 at the start. A call takes one credit of every
//               peer before it writes (wait for 1, set to 0) and its consumer gives one to every
//               peer when it has read the slot and reset the signals and tags.
// Invariants:
//   1. Between taking p's credit and getting it back, p's slot and its words for this rank are
//      written by this rank only, once. So no data is overwritten unread, and no signal is lost to
//      a reset: the reset is before the credit in p's order, the next signal after it in ours.
//   2. The signal of a chunk is written after its data on the same stream, by a stream memory
//      operation with its default barrier (release, system scope). Order in the stage kernel:
//      src/transport/stage.cu.
//   3. No rank waits for a credit of this call's consumers, only of the last call's on the same
//      slot, whose inputs were all sent before; so ranks cannot wait in a ring. That may be the
//      call just before, as between a graph's replay and an eager call (SlotRing): its consumers
//      want nothing that comes behind them on any rank's streams.
//   4. Every wait ends. Those of kernels have a limit; those who push share that of the warp with
//      the first item, which they wait for too. A wait on a stream (push: credits; pull:
//      tags) has none, but a consumer that is running, or free to start, waits beside it: a peer
//      that gives no credit or tag any more sends no chunk of this call either, so that consumer
//      passes its limit.
//   5. A staged shard is overwritten only after the credits were taken, so after the peers have
//      pulled it: a peer gives the credit when its consumer, which waits for that copy, has loaded
//      it. A slot's own rows are written and read by this rank's streams only, one call after
//      another.
//   6. All values written are fixed per call site, and every word is reset by its consumer, so a
//      captured CUDA graph can be replayed any number of times, between eager calls too. The slots
//      of a capture do not depend on what was called or captured before, on this rank or another.
//   7. SM push: who pushes claims the work, part by part, and waits for credits only; spare warps
//      and CTAs without a tile wait for each other's part, but not for long and with nothing
//      claimed; consumers copy an item before they wait for anything but their cluster's start. So
//      a single cluster with tiles that runs sends all of the shard, and no CTA that does not run
//      yet is needed, on any rank: other kernels, other processes or a slow start only delay.
//   8. What follows the consumer on its stream may overwrite the shard and read A. Push: the
//      consumer's last warp awaits the word `sent`, which the copy stream writes after its last
//      copy; the copies wait for credits only, which the peers give before they await theirs (3).
//      Pull: the consumer has awaited every copy's signal, and starts after the stage kernel.
//   9. What a call's copies wait for needs no kernel that is enqueued, or captured, behind them on
//      this rank: credits (3), and tags, which the stage kernels write. They come before the
//      consumer. So where streams, or the branches of a graph, run one after the other in that
//      order (one hardware queue, by CUDA_DEVICE_MAX_CONNECTIONS=1; a tool that serialises), calls
//      are slow but end. CUDA promises no concurrency; in the other order, with the consumer first,
//      they would all wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "symmetric/slot_ring.hpp"
#include "transport/gather_transport.hpp"

namespace agmm {

class AllGather {
 public:
  /// `bases[p]`: address, on the current device, of rank p's symmetric memory, laid out by
  /// WorkspaceLayout. `reserved_sms`: multiprocessors that its kernels leave to others.
  AllGather(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes,
            int reserved_sms = 0);
  ~AllGather();
  AllGather(AllGather const&) = delete;
  AllGather& operator=(AllGather const&) = delete;

  // A call, in this order: enter, next, begin, the consumer's launch, end.

  /// A call on `stream`: finds out whether it is being captured. Enqueues nothing. Throws
  /// std::runtime_error when CUDA refuses, or an earlier call, eager or of this capture, failed
  /// after its begin().
  void enter(void* stream);
  /// What begin() will give the consumer. Throws std::invalid_argument when the request does not
  /// fit; enqueues nothing.
  Gathered next(GatherRequest const& request) const;
  /// Enqueues, behind what `stream` holds, all that comes before the consumer, the copies included.
  /// When this or a later step throws, abandon() has to follow, and enter() will refuse, unless
  /// nothing was enqueued for want of an event.
  void begin(GatherRequest const& request, Gathered const& gathered, void* stream);
  /// Enqueues behind the consumer what `gathered.release` says, where the consumer does not do it.
  void release(Gathered const& gathered, void* stream);
  /// What comes on `stream` afterwards finds the shard free for reuse and a_out complete.
  void end(void* stream);
  /// A call that began does not end: its capture is made invalid, so that no graph has half a call.
  /// Nothing where it did not begin.
  void abandon() noexcept;

  /// What is enqueued on `stream` from now on comes behind the last call: the last eager one, or
  /// that of the capture that `stream` is in.
  void precede(void* stream);

  /// The slot of the call entered.
  int slot() const;
  bool is_captured() const;
  int rank() const { return links_.memory.rank(); }
  int world_size() const { return links_.memory.world_size(); }
  std::size_t slot_bytes() const { return links_.memory.slot_bytes(); }
  int device() const { return device_; }
  /// Multiprocessors for this workspace's kernels.
  int sm_count() const { return links_.sm_count; }
  /// Held for a whole call.
  std::mutex& mutex() { return mutex_; }

 private:
  struct Handles;   // streams and events
  struct Sequence;  // those of eager calls, or of one capture

  Links links_;
  int device_ = 0;
  SlotRing ring_;
  std::mutex mutex_;
  Handles* handles_;
};

}  // namespace agmm
