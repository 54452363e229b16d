// The kernel of the transports that brings rows of the own shard to where peers or boundary tiles
// read them, before the consumer starts. A kernel of ours, because it waits for the credits with a
// limit, reads the shard once for two destinations, and writes the signals in the same launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "sync/wait_limit.hpp"

namespace agmm {

/// Addresses and bytes are multiples of 16.
struct StageCopy {
  void const* from = nullptr;
  void* to = nullptr;
  void* also_to = nullptr;  // or null
  std::size_t bytes = 0;
};

struct StageArgs {
  static constexpr int kMaxCopies = 2;  // head and tail of the shard
  StageCopy copies[kMaxCopies]{};

  int32_t world_size = 1;
  int32_t slot = 0;  // for the message
  // One per rank, or null: those of the peers are awaited (1) before anything is written, and taken
  // (0) after.
  uint32_t* credits = nullptr;
  uint32_t* finished_ctas = nullptr;  // 0 before and after

  // Written when everything is copied, in this order, release at system scope.
  uint32_t tag = 1;
  uint32_t* const* peer_tags = nullptr;  // device array of world_size words to write, or null
  uint32_t* own_signal = nullptr;

  WaitLimit limit{};
};

/// Loads the kernel on the current device: loading waits for the device, so not in mid-call.
cudaError_t prepare_stage();
cudaError_t launch_stage(StageArgs const& args, int sm_count, cudaStream_t stream);

}  // namespace agmm
