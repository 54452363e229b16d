// Host launcher of the async-input matmul: problem + config + pointers + stream. No torch, no
// CUTLASS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "agmm/problem.hpp"
#include "transport/sm_push.hpp"

namespace agmm {

struct KernelEntry;
struct WaitReport;
struct TileTimes;

/// out = A @ B (+ bias), where chunk i of A may be read once signals[i] == ready_value.
/// A and A_local are row-major with leading dimension k, out with leading dimension n. All pointers
/// are device memory, aligned to 16 bytes.
struct AsyncInputArgs {
  Problem problem{};
  KernelConfig config{};
  void const* a = nullptr;
  void const* a_local = nullptr;  // rows [local_begin, local_end) of A, readable at once; or null
  void const* b = nullptr;
  int64_t ldb = 0;             // elements between rows (RowMajor) or columns (ColumnMajor) of B
  void const* bias = nullptr;  // [n], the dtype of A; or null
  void* out = nullptr;
  void* a_out = nullptr;              // [m, k], where the kernel writes all of A; or null
  uint32_t const* signals = nullptr;  // chunks_m * chunks_k words; null: all of A is ready
  uint32_t ready_value = 1;
  int32_t chunks_m = 1;
  int32_t chunks_k = 1;
  int32_t chunk_pivot = 0;
  int32_t local_begin = 0;
  int32_t local_end = 0;
  int32_t sm_count = 0;  // CTAs of the persistent grid at most; 0: the device's SMs

  // Who waits, for the message when a wait passes its limit.
  int32_t rank = 0;
  int32_t chunks_per_rank = 1;  // 0: the chunks come from nobody that is known
  bool mismatch_is_fatal = false;
  uint32_t const* tags = nullptr;
  uint32_t count_bits = 0;  // of a signal that several CTAs add to (agmm::WaitLimit)
  uint64_t limit_ns = 60'000'000'000ull;
  WaitReport* report = nullptr;  // filled in by the launcher

  // What the kernel does when it has read A (see agmm::Release).
  uint32_t* release_signals = nullptr;
  int32_t release_count = 0;
  uint32_t* counters = nullptr;
  int32_t counter_count = 1;
  uint32_t* const* peer_credits = nullptr;
  int32_t peer_count = 0;
  uint32_t* sent = nullptr;
  SmPushArgs push{};  // what the kernel's spare warps push; a null shard: nothing

  // Of config.splits > 1: max_split_scratch_bytes(), of which the first kSplitCounterBytes are 0
  // before the launch, and after it. Not to be used by two launches at once.
  void* split_scratch = nullptr;

  uint32_t* report_lock = nullptr;  // filled in by the launcher
  TileTimes* tile_times = nullptr;  // [tiles_m * tiles_n], or null
};

/// Writes the GPU's global timer in ns, the clock of TileTimes, when the stream comes to it.
void record_time(uint64_t* ns, void* stream);

/// The kernels of this build.
std::vector<KernelShape> built_kernels();

/// Whether several CTAs can compute a tile of this kernel together (KernelConfig::splits).
bool can_split(KernelShape const& shape);

constexpr std::size_t kSplitCounterBytes = 1024;

/// Enough AsyncInputArgs::split_scratch for every kernel of this build on the current device.
std::size_t max_split_scratch_bytes();

/// Loads every kernel of this build on the current device. Loading waits for the device, so a
/// kernel that is loaded at its first call can wait for another group's call, which waits for its
/// peers. Throws std::runtime_error where there is none for the device, or when CUDA refuses.
void load_kernels();

/// A matmul that is ready to be launched; cheap to copy.
class PreparedMatmul {
 public:
  /// Enqueues the matmul on a stream of the current device. Throws std::runtime_error when CUDA
  /// refuses.
  void launch(void* stream) const;

 private:
  friend PreparedMatmul prepare_async_input_mm(AsyncInputArgs const& args);
  KernelEntry const* kernel_ = nullptr;
  std::shared_ptr<void> params_;
};

/// Everything that can fail short of the launch itself: checks, shared memory, TMA descriptors
/// (kept for the next call with the same arguments). Throws std::invalid_argument when the problem
/// is not legal for the kernel or the kernel is not in this build, std::runtime_error where this
/// build has none for the device, or when CUDA refuses.
PreparedMatmul prepare_async_input_mm(AsyncInputArgs const& args);

}  // namespace agmm
