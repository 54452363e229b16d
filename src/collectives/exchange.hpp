// The kernels of the collectives: what they have to know, and how they are launched.
//
// In a call every rank sends each other rank its segment, into that one's memory, and takes out
// what the others sent; an all-reduce in two steps then does so with the sums.
//
//   packets   group -> packet in the peer's memory | ... | own memory: wait, take out, add, store
//   blocks    groups -> the peer's memory | block's signal | ... | wait, add, store | ...
//
// Who waits for whom, and why it ends. CTA i waits for what CTA i of the other ranks sends: the
// ranks have the same grid and take the same groups in the same order. It sends all of its first
// step before it waits, so in the first step it waits only until those CTAs run; and a second step
// is sent when the first is there. CTAs start in the order of their numbers: where not all find
// room at once, the lowest that is not done runs on every rank, and nothing keeps it from ending.
//
// Why two slots are enough, without credits. A launch ends on no rank before it has begun on all:
// it ends when something has come from every rank, or a sum of what has. Launches of a rank run one
// after the other, each from its start to its end. So who begins launch n + 2 has ended n + 1,
// which the others have begun, so they have ended launch n and have taken everything out of its
// slot. The same slot is taken by all, since all make the same calls; each CTA counts for itself
// and for those that a smaller grid leaves out (`turns`), so nobody has to be last.
//
// Every flag and signal is reset by the thread that has seen it, at most one per launch and place;
// the reset is in the owner's memory before its next kernel begins, which is before a peer can
// write there again. So nothing that was left over is ever taken for new, in replayed graphs too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "agmm/collectives.hpp"
#include "symmetric/collective_layout.hpp"
#include "sync/wait_limit.hpp"

namespace agmm {

/// What becomes of what the ranks send each other.
enum class ExchangeStep : int32_t {
  Gather = 0,       // every rank's elements are kept
  Sum = 1,          // they are added: all of them by every rank
  Scatter = 2,      // each rank adds its own
  SumAndShare = 3,  // and the sums are gathered
  GatherTwo = 4     // every rank's elements of two tensors are kept
};

constexpr bool is_gather(ExchangeStep step) {
  return step == ExchangeStep::Gather || step == ExchangeStep::GatherTwo;
}

/// The second tensor of GatherTwo. Its groups have the numbers from `first` on.
struct SecondTensor {
  char const* in = nullptr;
  char* out = nullptr;
  int64_t out_stride = 0;
  int32_t first = 0;
  int32_t whole = 0;     // groups that are full, and may be loaded by words or 16 bytes
  int32_t elements = 0;  // of a rank
};

/// Every rank sends a segment to each other: its only one, or of w that lie `in_stride` apart that
/// rank's. Whatever a kernel can have computed beforehand is: a thread that moves one group of a
/// small call takes longer to find its addresses than to move it.
struct ExchangeArgs {
  int32_t rank = 0;
  int32_t world_size = 1;
  char const* in = nullptr;
  char* out = nullptr;
  int64_t in_stride = 0;   // bytes from one rank's segment to the next
  int64_t out_stride = 0;  // from what one rank has sent, or summed, to the next
  // Groups are counted through all segments where they are cut out of one tensor (SumAndShare),
  // else from the beginning of each: group g of rank r's is number r * segment + g.
  int32_t segment = 0;
  int32_t groups = 0;    // of the longest segment
  int32_t end = 0;       // of numbers; the last segments may be shorter, or empty
  int32_t whole = 0;     // up to here they are full, and may be loaded by words or 16 bytes
  int32_t elements = 0;  // up to `end`
  float scale = 1.0f;    // of sums
  uint32_t tag = 0;      // what signals carry; not 0
  SecondTensor second{};

  // Where the first slot's data lies in each rank's memory, this rank's first and then those after
  // it; and what lies where from there on.
  char* slots[kMaxExchangeRanks]{};
  int64_t slot_bytes = 0;
  int32_t stretch_bytes = 0;
  int32_t thread_groups = 1;  // of a block, that a thread moves; up to kMaxThreadGroups
  int32_t blocks = 0;         // signals of a stretch
  int64_t signals = 0;
  int64_t signal_slot_bytes = 0;
  uint32_t* turns = nullptr;  // this rank's

  // A wait that takes long looks at these: this rank's words of both slots, whatever the carrier.
  char const* own_packets[CollectiveLayout::kSlots]{};
  char const* own_signals[CollectiveLayout::kSlots]{};
  int32_t packet_stretch_bytes = 0;
  WaitLimit limit{};

  // Whether the kernel behind a gather by packets may start its CTAs when all of this one's have
  // started: a streaming kernel, which reads its weight until this one has ended. No CTA of this
  // one is kept from running, since all do; what the peers run is on their GPUs.
  bool lets_next_start = false;
};

/// What an all-reduce takes whose sum gets a residual and a norm, row by row. Then `in` and `out`
/// are rows too, `out` is the new residual, and in two steps every rank sums `owned_rows`.
struct NormArgs {
  char const* residual = nullptr;
  char const* weight = nullptr;  // one row
  char* normed = nullptr;
  int64_t row_bytes = 0;
  int32_t rows = 0;
  int32_t owned_rows = 1;
  int32_t row_elements = 0;
  int32_t row_groups = 0;
  int32_t whole = 0;  // groups of a row that are full, and may be loaded by words
  float eps = 0;
};

/// The partners of a rank that has no link to some others, a bit for each: who sends to it in the
/// first step, and who in the second; to whom it sends, and to whom it passes on what a rank has
/// sent it, both by how far they come after it.
struct RelayArgs {
  uint32_t near = 0;
  uint32_t far = 0;
  uint32_t near_distances = 0;
  uint32_t passed_on[kMaxExchangeRanks]{};
};

using ExchangeKernel = void (*)(ExchangeArgs);
using NormKernel = void (*)(ExchangeArgs, NormArgs);
using RelayedKernel = void (*)(ExchangeArgs, RelayArgs);

/// Null for a sum of bytes.
ExchangeKernel packets_kernel_of(CollectiveElement element, ExchangeStep step, int world_size);
ExchangeKernel blocks_kernel_of(CollectiveElement element, ExchangeStep step, int world_size);

/// There is one for Sum and for SumAndShare.
NormKernel norm_kernel_of(CollectiveElement element, ExchangeStep step, int world_size);
/// There is one for Gather and for Sum.
RelayedKernel relayed_kernel_of(CollectiveElement element, ExchangeStep step);

/// Alike on all ranks.
struct ExchangeGrid {
  int ctas = 1;
  int threads = kExchangeThreads;
};

/// Loads the kernels for so many ranks on the current device.
cudaError_t prepare_exchanges(int world_size);
cudaError_t prepare_relayed();
cudaError_t launch_exchange(ExchangeArgs const& args, CollectiveElement element, ExchangeStep step,
                            Carrier carrier, ExchangeGrid const& grid, cudaStream_t stream);
cudaError_t launch_norm(ExchangeArgs const& args, NormArgs const& norm, CollectiveElement element,
                        ExchangeStep step, ExchangeGrid const& grid, cudaStream_t stream);
cudaError_t launch_relayed(ExchangeArgs const& args, RelayArgs const& relays,
                           CollectiveElement element, ExchangeStep step, ExchangeGrid const& grid,
                           cudaStream_t stream);

}  // namespace agmm
