// The kernels of a dispatch of rows: what they have to know, and how they are launched.
//
// Each rank makes two launches, in the order of its stream.
//   offer     own tokens -> own slot | tag -> the peers. It also finds the first row of each source
//             and expert, and sets the counts of rows that have come to 0.
//   dispatch  peers' tags awaited | rows: peers' slots -> own memory | counts
// A grouped matmul may start beside the dispatch, as soon as all CTAs of that run: it waits for the
// counts.
//
// Memory order.
//   1. A CTA of offer writes to the slot, bar.sync, counts itself (acq_rel, GPU scope). The last
//      one thereby has acquired the writes of all, and releases the tag at system scope.
//   2. A lane of dispatch acquires the tag at system scope; __syncwarp() carries this to the lanes
//      that load, past L1.
//   3. The lanes store a row, __syncwarp(), and a lane for each place of it adds to the count with
//      release semantics at GPU scope. grouped_kernel.hpp acquires the count and fences its proxy.
//   4. All loads of a CTA of dispatch have their values when it has stored them, which is before
//      bar.sync and its count (acq_rel, GPU scope), so before the launch ends.
//
// Why two slots are enough, without credits. Dispatch n ends on no rank before it has seen the
// offers n of all, also those of which it wants no row. A rank's launches run one after the other,
// so its offer n comes behind the end of its dispatch n - 1. So who begins offer n + 1, which is
// behind the end of its own dispatch n, knows that all dispatches n - 1 have ended: nobody reads
// the slot of call n - 1, which is that of n + 1, any more. The tags that dispatch n - 1 has seen
// are reset at its end, so before the offer n of the same rank, and a peer's tag n + 1 comes behind
// that offer. A word in the rank's memory says which slot is next; offer alone changes it, in the
// order of the stream, so graphs that are replayed take turns too. All ranks make the same calls,
// so they agree.
//
// Why every wait ends. Offer waits for nobody, dispatch for the peers' offers of the same call. A
// rank's offer waits for what is ahead of it in its stream, which is earlier in the order of the
// calls; the first launch in that order that has not ended waits for no later one. A matmul waits
// for dispatch alone, all CTAs of which run before one of its own starts. No rank waits for the end
// of a peer's matmul.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "symmetric/collective_layout.hpp"
#include "sync/wait_limit.hpp"

namespace agmm {

struct DispatchArgs {
  int32_t rank = 0;
  int32_t world_size = 1;
  int32_t choices = 0;
  int32_t experts = 0;
  int32_t capacity = 0;
  int32_t vectors = 0;  // of 16 bytes, in a row
  int32_t first_token[kMaxExchangeRanks + 1]{};
  char const* x = nullptr;
  int32_t const* tokens = nullptr;
  int32_t const* offsets = nullptr;
  int32_t const* positions = nullptr;
  char* rows = nullptr;
  char* gathered = nullptr;
  uint32_t* arrived = nullptr;
  int32_t* begins = nullptr;

  char* memory[kMaxExchangeRanks]{};  // of each rank
  int64_t slot_bytes = 0;
  // Where the first slot's tags lie, in bytes, and how far away the second one's are.
  int64_t offers = 0;
  int64_t words_of_slot = 0;
  uint32_t* turn = nullptr;      // this rank's
  uint32_t* finished = nullptr;  // this rank's; 0 before and after each launch
  uint32_t tag = 0;              // not 0
  WaitLimit limit{};
};

/// Loads the kernels on the current device.
cudaError_t prepare_dispatch();
/// `sm_count`: CTAs are at most twice as many.
cudaError_t launch_offer(DispatchArgs const& args, int sm_count, cudaStream_t stream);
/// `in_pairs`: as clusters of two, on a GPU that has clusters, so that the multiprocessors that are
/// left have room for a matmul's; `ctas` is even then.
cudaError_t launch_dispatch(DispatchArgs const& args, int ctas, bool in_pairs, cudaStream_t stream);

}  // namespace agmm
