// The kernels of the collectives: what they have to know, and how they are launched.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "agmm/collectives.hpp"
#include "symmetric/collective_layout.hpp"
#include "sync/wait_limit.hpp"

namespace agmm {

/// What becomes of what the ranks send each other.
enum class ExchangeStep : int32_t {
  Gather = 0,      // every rank's elements are kept
  Sum = 1,         // they are added
  SumAndShare = 2  // and the sums are gathered
};

/// Every rank sends a segment to each other: of w that lie `in_stride` apart, its own. Strides and
/// counts are of elements.
struct ExchangeArgs {
  int32_t rank = 0;
  int32_t world_size = 1;
  void const* in = nullptr;
  void* out = nullptr;
  int64_t in_stride = 0;    // 0: all ranks get the same
  int64_t out_stride = 0;   // from what one rank has sent, or summed, to the next
  int32_t count = 0;        // of a segment
  int32_t total = 0;        // SumAndShare: of all segments; the last ones may be shorter or empty
  bool is_aligned = false;  // groups may be loaded and stored by words (packets) or 16 bytes
  float scale = 1.0f;       // of sums
  uint32_t tag = 0;         // what signals carry; not 0

  // All ranks' memory, and where things lie in it.
  char* memory[kMaxExchangeRanks]{};
  int64_t data[CollectiveLayout::kSlots]{};
  int32_t stretch_bytes = 0;
  int64_t signals[CollectiveLayout::kSlots]{};
  int64_t packets[CollectiveLayout::kSlots]{};  // whatever the carrier
  int32_t packet_stretch_bytes = 0;
  int32_t blocks = 0;         // signals of a stretch
  int32_t thread_groups = 1;  // of a block, that a thread moves at a time; up to kMaxThreadGroups
  int64_t turns = 0;

  WaitLimit limit{};
};

/// Alike on all ranks. Blocks want kExchangeThreads.
struct ExchangeGrid {
  int ctas = 1;
  int threads = kExchangeThreads;
};

/// Loads the kernels on the current device.
cudaError_t prepare_exchanges();
cudaError_t launch_exchange(ExchangeArgs const& args, CollectiveElement element, ExchangeStep step,
                            Carrier carrier, ExchangeGrid const& grid, cudaStream_t stream);

}  // namespace agmm
