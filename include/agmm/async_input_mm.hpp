// The host launcher of the async-input matmul: it takes problem, config, operands, arrival and
// stream, and includes neither torch nor CUTLASS.
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

/// The scales of fp8 operands, float32 in device memory: out = (scale of the row * scale of the
/// column) * sum + bias. With Accumulation::Block and Block1x128 the scales are block scales: each
/// sum over kScaleBlock of K has its own. Then `a`, `a_local` and `a_out` hold k / kScaleBlock
/// scales, rounded up, for each row, one after the other.
struct Scales {
  float const* a = nullptr;        // [m] or [1]; read with the rows of A, so they may come as late
  float const* b = nullptr;        // [n] or [1]
  bool a_per_row = false;          // else one for all rows
  bool b_per_column = false;       // else one for all columns
  float const* a_local = nullptr;  // for the rows that Operands::a_local has
  float* a_out = nullptr;          // [m], where the kernel writes the scales of all rows; or null
  // The strides of B's block scales, in elements: from one scale block of K to the next, and from
  // one scale block of columns to the next (Block). The scales of single columns (Block1x128) are
  // neighbours.
  int32_t b_k_stride = 0;
  int32_t b_n_stride = 0;
  // With a gate `b` are the scales of gate, and these those of up, with the same strides.
  float const* b_up = nullptr;
};

/// The most weights of one call of a streaming kernel.
constexpr int kMostStreamedWeights = 4;

/// A weight of a call that multiplies several with the same A, in the layout and with the kind of
/// scales that the first one has.
struct MoreWeight {
  void const* b = nullptr;
  int64_t ldb = 0;
  int32_t n = 0;
  void const* bias = nullptr;     // [n] or null
  void* out = nullptr;            // [m, n]
  float const* scales = nullptr;  // as Scales::b
  int32_t scale_k_stride = 0;
  int32_t scale_n_stride = 0;
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
  // A gate has two weights: b and bias are those of gate, with out_columns() columns each,
  // and these are those of up, in the same layout.
  void const* b_up = nullptr;
  int64_t ldb_up = 0;
  void const* bias_up = nullptr;
  // Epilogue::GateFp8: the scales of out, [m, out_columns() / kScaleBlock], rounded up, which the
  // kernel writes; or [1] where one for all of out is given, of which the inverse may be rounded.
  float* out_scales = nullptr;
  float const* given_out_scale = nullptr;
  // Streaming kernels without a gate multiply these weights in the same launch. Problem::n counts
  // the columns of all, and `out` has those of the first alone.
  MoreWeight more[kMostStreamedWeights - 1]{};
  int32_t more_count = 0;
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
  // Scratch memory for config.splits > 1, max_split_scratch_bytes() long. Its first
  // kSplitCounterBytes are 0 before the launch, and the launch leaves them 0. No two launches may
  // use it at the same time.
  void* split_scratch = nullptr;
  TileTimes* tile_times = nullptr;  // [tiles_m * tiles_n] for kernels with `timed`, or null
  // Whether a kernel that may still run writes B, as one that copies it does.
  bool weight_is_new = false;
};

/// Writes the GPU's global timer in ns, the clock of TileTimes, when the stream comes to it.
void record_time(uint64_t* ns, void* stream);

/// The kernels of this build for all ops, and the kernels that were added since. No two of them
/// have the same architecture, op, dtype, accumulation, layout of B, epilogue and shape.
std::vector<KernelFacts> built_kernels();

/// The bytes of the counters at the beginning of AsyncInputArgs::split_scratch: 4 for each tile.
/// Where K is split there are no more tiles than multiprocessors.
constexpr std::size_t kSplitCounterBytes = 1024;

/// The bytes of AsyncInputArgs::split_scratch that suffice, on the current device, for every kernel
/// that there is now.
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

/// Does everything that can fail short of the launch itself: checks, shared memory, TMA descriptors
/// (cached for the next call with the same arguments). Throws std::invalid_argument when the
/// problem is not legal for the kernel or the kernel is not in this build, std::runtime_error where
/// this build has none for the device, or when CUDA refuses.
PreparedMatmul prepare_async_input_mm(AsyncInputArgs const& args);

}  // namespace agmm
