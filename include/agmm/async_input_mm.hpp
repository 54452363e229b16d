// Host launcher of the async-input matmul: problem + config + operands + arrival + stream. No
// torch, no CUTLASS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "agmm/arrival.hpp"
#include "agmm/limits.hpp"
#include "agmm/problem.hpp"

namespace agmm {

struct CallSpec;
struct KernelVariant;
struct TileTimes;

/// float32 on the device: out = (scale of the row * scale of the column) * sum + bias. Of
/// Accumulation::Block and Block1x128 each sum over kScaleBlock of K has its own scales; then `a`,
/// `a_local` and `a_out` have k / kScaleBlock, rounded up, for each row, one after the other.
struct Scales {
  float const* a = nullptr;        // [m] or [1]; read with the rows of A, so they may come as late
  float const* b = nullptr;        // [n] or [1]
  bool a_per_row = false;          // else one for all rows
  bool b_per_column = false;       // else one for all columns
  float const* a_local = nullptr;  // those of the rows that Operands::a_local has
  float* a_out = nullptr;          // [m], where the kernel writes those of all rows; or null
  // Of blocks: elements between those of one block of K and the next, and from one block of columns
  // (Block) to the next; those of single columns (Block1x128) are neighbours.
  int32_t b_k_stride = 0;
  int32_t b_n_stride = 0;
};

/// A and A_local are row-major with leading dimension k, out with leading dimension
/// Problem::out_columns(). All pointers are device memory, aligned to 16 bytes.
struct Operands {
  void const* a = nullptr;
  void const* a_local = nullptr;  // rows [local_begin, local_end) of A, readable at once; or null
  int32_t local_begin = 0;
  int32_t local_end = 0;
  void* a_out = nullptr;  // [m, k], where the kernel writes all of A; or null
  void const* b = nullptr;
  int64_t ldb = 0;             // elements between rows (RowMajor) or columns (ColumnMajor) of B
  void const* bias = nullptr;  // [n], the dtype of out; or null
  void* out = nullptr;         // [m, out_columns()]
  Scales scales{};             // of fp8 operands
};

/// out = A @ B (+ bias), where A is read chunk by chunk as it arrives.
struct AsyncInputArgs {
  Problem problem{};
  KernelConfig config{};
  Operands operands{};
  Arrival arrival{};
  int32_t rank = 0;                     // for the message when a wait passes its limit
  uint64_t limit_ns = kDefaultLimitNs;  // of each wait; past it the process ends
  int32_t sm_count = 0;                 // CTAs at most; 0, or more than that: the device's SMs
  // Of config.splits > 1: max_split_scratch_bytes(), of which the first kSplitCounterBytes are 0
  // before the launch, and after it. Not to be used by two launches at once.
  void* split_scratch = nullptr;
  TileTimes* tile_times = nullptr;  // [tiles_m * tiles_n] for kernels with `timed`, or null
};

/// Writes the GPU's global timer in ns, the clock of TileTimes, when the stream comes to it.
void record_time(uint64_t* ns, void* stream);

/// The kernels of this build for all ops, and those that were added since: no two have the same
/// architecture, op, dtype, accumulation, layout of B, epilogue and shape.
std::vector<KernelFacts> built_kernels();

/// A counter of 4 bytes per tile, of which there are no more than multiprocessors where K is split.
constexpr std::size_t kSplitCounterBytes = 1024;

/// Enough AsyncInputArgs::split_scratch for every kernel that there is now, on the current device.
std::size_t max_split_scratch_bytes();

/// Loads every kernel that there is for a matmul on the current device. Loading waits for the
/// device, so a kernel that is loaded at its first call can wait for another group's call, which
/// waits for its peers. Throws std::runtime_error where there is none for the device, or when CUDA
/// refuses.
void load_kernels();

/// A matmul that is ready to be launched; cheap to copy.
class PreparedMatmul {
 public:
  /// Enqueues the matmul on a stream of the current device. Throws std::runtime_error when CUDA
  /// refuses.
  void launch(void* stream) const;

 private:
  friend PreparedMatmul prepare(CallSpec const& call);
  KernelVariant const* kernel_ = nullptr;
  std::shared_ptr<void> params_;
};

/// Everything that can fail short of the launch itself: checks, shared memory, TMA descriptors
/// (kept for the next call with the same arguments). Throws std::invalid_argument when the problem
/// is not legal for the kernel or the kernel is not in this build, std::runtime_error where this
/// build has none for the device, or when CUDA refuses.
PreparedMatmul prepare_async_input_mm(AsyncInputArgs const& args);

}  // namespace agmm
