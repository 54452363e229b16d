// An all-gather of the rows of A, as a caller describes it.
#pragma once

#include <cstdint>

#include "agmm/limits.hpp"
#include "agmm/problem.hpp"

namespace agmm {

enum class Transport : int32_t { CopyEnginePush = 0, CopyEnginePull = 1, SmPush = 2 };

/// How SM push cuts a shard; of no meaning for the other transports.
struct SmPushCut {
  int32_t parts = 0;          // that the rows of a chunk are cut into; a power of 2
  int32_t chunk_columns = 0;  // of a chunk
  int32_t first_peers = 0;    // this many nearest consumers get the whole shard before the others
  int32_t head_chunks = 0;    // 0: all. CTAs without a tile push the others
};

/// A shard of `rows` rows of `k` elements on each of w ranks.
struct Gather {
  Transport transport = Transport::CopyEnginePush;
  SmPushCut push{};
  void const* a_shard = nullptr;  // [rows, k], device memory, aligned to 16 bytes
  void* a_out = nullptr;          // [w * rows, k]; null where A is not wanted, which pull needs
  int32_t rows = 0;
  int32_t k = 0;
  DType dtype = DType::BFloat16;
  uint64_t limit_ns = kDefaultLimitNs;  // of each wait; past it the process ends
  // The scales of an fp8 shard, [rows, scale_columns]; they lie behind A in a slot. Pushes alone
  // move them.
  float const* scales = nullptr;
  float* scales_out = nullptr;  // [w * rows, scale_columns], or null
  int32_t scale_columns = 1;    // of one row: 1, or 1 for each kScaleBlock of K
};

/// Whether additions of `device` to words in the memory of `peer` are atomic there, which SM push
/// needs; over NVLink they are. Throws std::runtime_error when CUDA refuses.
bool has_peer_atomics(int device, int peer);

}  // namespace agmm
