// The SM push transport: a few CTAs write the own shard into the peers' gather buffers, column
// chunk by column chunk, and signal each.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "agmm/chunking.hpp"

namespace agmm {

struct WaitReport;

constexpr int kMaxPushRanks = 16;
constexpr int kMaxPushCtas = 64;

struct PushArgs {
  int32_t rank = 0;
  int32_t world_size = 1;
  int32_t slot = 0;  // for the message

  void const* shard = nullptr;  // [rows, row_bytes]; addresses and bytes are multiples of 16
  int32_t rows = 0;
  int32_t row_bytes = 0;
  int32_t chunk_bytes = 0;  // of a row; the last chunk may be shorter
  int32_t chunks = 1;
  // This many of the nearest consumers get the whole shard before the others get any of it.
  int32_t first_peers = 0;
  /// Where this rank's rows and signals lie at each rank. At its own place it writes only the rows
  /// [0, head) and [rows - tail, rows); none and no signals where both are 0.
  struct Place {
    void* rows;
    uint32_t* signals;  // one per chunk
  } places[kMaxPushRanks]{};
  int32_t head = 0;
  int32_t tail = 0;

  // Each CTA adds 1 to a signal when its part of a chunk is there, the first one the tag too.
  uint32_t tag = 0;
  uint32_t* credits = nullptr;            // one per rank: awaited (1) before a write, and taken (0)
  uint32_t* ctas_with_credits = nullptr;  // 0 before and after

  uint64_t limit_ns = 0;
  WaitReport* report = nullptr;
  uint32_t* report_lock = nullptr;

  FastDiv chunk_vectors{};  // by the 16-byte columns of a chunk; these two by launch_push
  FastDiv last_vectors{};   // of the last chunk
};

/// Loads the kernel on the current device: loading waits for the device, so not in mid-call.
cudaError_t prepare_push();
/// `cluster_size`: that of the consumer, so that the two do not break up each other's clusters;
/// divides `ctas`.
cudaError_t launch_push(PushArgs const& args, int ctas, int cluster_size, cudaStream_t stream);

}  // namespace agmm
