// out_i = all_gather(A_shard) @ B_i (+ bias_i), one call that enqueues everything.
#pragma once

#include <memory>
#include <vector>

#include "agmm/async_input_mm.hpp"
#include "transport/all_gather.hpp"

namespace agmm {

/// One weight that shares the gather.
struct Weight {
  void const* b = nullptr;
  int64_t ldb = 0;
  BLayout b_layout = BLayout::ColumnMajor;
  int32_t n = 0;
  void const* bias = nullptr;
  void* out = nullptr;  // [w * rows, n]
  KernelConfig config{};
};

struct FusedArgs {
  Transport transport = Transport::CopyEnginePush;
  // SM push: parts that the rows of a chunk are cut into, columns of a chunk (a multiple of 8), and
  // the nearest consumers that are served before the others.
  int32_t push_parts = 0;
  int32_t chunk_columns = 0;
  int32_t first_peers = 0;
  int32_t head_chunks = 0;        // see agmm::SmPush
  void const* a_shard = nullptr;  // [rows, k]
  // [w * rows, k], or null where A is not wanted. Pull copies A there and the matmuls read it
  // there; with push the first matmul stores what it reads.
  void* a_out = nullptr;
  int32_t rows = 0;
  int32_t k = 0;
  DType dtype = DType::BFloat16;
  uint64_t limit_ns = 60'000'000'000ull;
  TileTimes* tile_times = nullptr;  // of the first weight's tiles
};

/// The op on one workspace. Safe to call from several threads.
class FusedAllGatherMatmul {
 public:
  /// As AllGather's; loads every kernel. reserved_sms: multiprocessors that matmuls leave free, for
  /// the kernels of other groups, which a peer may need before it can send what a matmul here waits
  /// for; and for copies between ranks that share a GPU, which are kernels. Throws
  /// std::runtime_error where this build has no kernel for the device, or CUDA refuses.
  FusedAllGatherMatmul(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes,
                       int reserved_sms = 0);

  std::size_t slot_bytes() const { return gather_.slot_bytes(); }

  /// Returns whether the stream is being captured into a graph. Throws std::invalid_argument, with
  /// nothing enqueued, when a part of the call is not legal; std::runtime_error when CUDA refuses,
  /// and in all calls after that: signals and slots of the ranks may no longer be in step. A
  /// capture in which a call fails becomes invalid, and nothing is left of it.
  bool operator()(FusedArgs const& args, std::vector<Weight> const& weights, void* stream);

 private:
  /// All that comes before the first launch; it takes longer than a launch.
  struct Call {
    FusedArgs args;
    std::vector<Weight> weights;
    int slot;
    GatherRequest request;
    std::vector<PreparedMatmul> matmuls;
  };

  // Both slots of some calls in turn: loops come back with the same tensors.
  static constexpr std::size_t kKeptCalls = 16;

  Call prepare(FusedArgs const& args, std::vector<Weight> const& weights) const;
  Call const& find_or_prepare(FusedArgs const& args, std::vector<Weight> const& weights);

  AllGather gather_;
  // Of configs that split K, for one call at a time. Not from a pool of the caller's allocator,
  // which may belong to a graph.
  std::shared_ptr<void> split_scratch_;
  std::vector<Call> calls_;  // prepared last
  std::size_t oldest_ = 0;
};

}  // namespace agmm
