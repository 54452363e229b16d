// The kernels of a combine of rows: what they have to know, and how they are launched.
//
// Each rank makes these launches, in the order of its stream.
//   open      credits awaited and taken | places of the tokens' rows, and rows that were computed
//             elsewhere -> own slot
//   matmuls   rows -> own slot, where they compute them
//   combine   tag -> the peers | the peers' tags awaited | rows: all slots -> sums -> out | tags
//             reset, credits -> the peers
//
// Memory order.
//   1. What open and the matmuls write is visible to combine, since a launch ends before the next
//      one begins. The thread of combine that sends the tag releases it at system scope, and all
//      that with it.
//   2. Each CTA of combine acquires the tags at system scope; a barrier carries this to its warps,
//      which load past L1.
//   3. All loads of a CTA have their values when it has stored what came of them, which is before
//      bar.sync and its count (acq_rel, GPU scope). The last CTA resets the tags, which every CTA
//      has seen, then releases the credits at system scope. The peer acquires its credit before it
//      writes to its slot, or sends the next tag.
//
// Why every wait ends. Open waits for the peers' combines of the call before; a combine waits for
// what is ahead of the peers' combines of the same call in their streams, which is earlier in the
// order of the calls. The first launch in that order that has not ended waits for no later one.
//
// Bits. The sum of a choice, of a rank, and of all ranks are made in float32 and in one order; no
// product is fused with its sum, so that the bits are those of torch's operations one by one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "agmm/row_combine.hpp"
#include "symmetric/collective_layout.hpp"
#include "sync/wait_limit.hpp"

namespace agmm {

struct CombineArgs {
  int32_t rank = 0;
  int32_t world_size = 1;
  int32_t choices = 0;
  int32_t parts = 1;
  int32_t vectors = 0;  // of 16 bytes, in a row
  int32_t first_token = 0;
  int32_t tokens = 0;      // of this rank
  int32_t all_tokens = 0;  // of all ranks
  int32_t capacity = 0;
  int32_t const* row_count = nullptr;
  int32_t const* positions = nullptr;
  char const* rows[kMostCombinedParts]{};  // to be copied, or null
  float const* weights = nullptr;
  char* out = nullptr;

  char* memory[kMaxExchangeRanks]{};  // of each rank: the places of rows, then
  int64_t slot_rows = 0;              // here, the rows
  int64_t part_bytes = 0;
  int64_t tags = 0;
  int64_t credits = 0;
  uint32_t* finished = nullptr;  // this rank's; 0 before and after each launch
  uint32_t tag = 0;              // not 0
  WaitLimit limit{};
};

/// Loads the kernels on the current device.
cudaError_t prepare_combine();
cudaError_t launch_open(CombineArgs const& args, int sm_count, cudaStream_t stream);
cudaError_t launch_combine(CombineArgs const& args, CollectiveElement element, int sm_count,
                           cudaStream_t stream);

}  // namespace agmm
