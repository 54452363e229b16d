// The op out_i = all_gather(A_shard) @ B_i (+ bias_i): one call enqueues everything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "agmm/gather.hpp"
#include "agmm/problem.hpp"

namespace agmm {

struct TileTimes;

/// One weight that shares the gather.
struct Weight {
  void const* b = nullptr;
  int64_t ldb = 0;
  BLayout b_layout = BLayout::ColumnMajor;
  int32_t n = 0;
  void const* bias = nullptr;
  void* out = nullptr;  // [w * rows, out_columns()]
  KernelConfig config{};
  // The fields from here on are read for fp8 operands only.
  float const* scales = nullptr;  // [n] or [1]; block scales as in Scales::b
  bool scale_per_column = false;  // else one for all columns
  Accumulation accumulation = Accumulation::Fast;
  int32_t scale_k_stride = 0;  // of block scales: Scales::b_k_stride
  int32_t scale_n_stride = 0;
  // These are read for kernels with another epilogue than Bias: n counts the columns of gate and up
  // together, and the next four fields are those of up (Operands::b_up).
  Epilogue epilogue = Epilogue::Bias;
  Activation activation = Activation::Relu;
  void const* b_up = nullptr;
  int64_t ldb_up = 0;
  void const* bias_up = nullptr;
  float const* scales_up = nullptr;  // of fp8 operands (Scales::b_up)
  float* out_scales = nullptr;       // Operands::out_scales
  float const* given_out_scale = nullptr;

  constexpr int32_t out_columns() const { return n / columns_per_out(epilogue); }
};

/// The op on one workspace: symmetric memory of a group of ranks, with buffers for the gathered A
/// that calls take in turn, signals and credits. Safe to call from several threads.
class FusedAllGatherMatmul {
 public:
  /// Bytes of symmetric memory that a workspace needs on every rank. slot_bytes: bytes of the
  /// largest gathered A, a multiple of 128.
  static std::size_t workspace_bytes(std::size_t slot_bytes, int world_size);

  /// Makes memory of workspace_bytes() a workspace. Each rank does so once before any rank's first
  /// call, and a barrier of the ranks follows. Enqueued on `stream`; throws std::runtime_error when
  /// CUDA refuses.
  static void initialise_workspace(void* memory, std::size_t slot_bytes, int world_size,
                                   void* stream);

  /// Makes the op on the ranks' workspaces and loads every kernel.
  /// `bases[p]`: address, on the current device, of rank p's workspace.
  /// reserved_sms: multiprocessors that matmuls leave free, for the kernels of other groups, which
  /// a peer may need before it can send what a matmul here waits for; and for copies between ranks
  /// that share a GPU, which are kernels.
  /// Throws std::invalid_argument for a number out of range, std::runtime_error where this build
  /// has no kernel for the device, or CUDA refuses.
  FusedAllGatherMatmul(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes,
                       int reserved_sms = 0);
  ~FusedAllGatherMatmul();
  FusedAllGatherMatmul(FusedAllGatherMatmul const&) = delete;
  FusedAllGatherMatmul& operator=(FusedAllGatherMatmul const&) = delete;

  std::size_t slot_bytes() const;

  /// Enqueues the call. `tile_times`: where the times of the first weight's tiles go, or null.
  /// Returns whether the stream is being captured into a graph. Throws std::invalid_argument, with
  /// nothing enqueued, when any of the call is not legal; std::runtime_error when CUDA refuses, and
  /// in all calls after that: signals and slots of the ranks may no longer be in step. A capture in
  /// which a call fails becomes invalid, and nothing is left of it.
  bool operator()(Gather const& gather, std::vector<Weight> const& weights, void* stream,
                  TileTimes* tile_times = nullptr);

  /// Makes what is enqueued on `stream` from now on wait for the last call: the last eager one, or
  /// the last one of the capture that `stream` is in. Calls of other workspaces of the group need
  /// it.
  void precede(void* stream);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace agmm
