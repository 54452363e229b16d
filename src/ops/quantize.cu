#include "ops/quantize.hpp"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <set>

#include "ops/quantize_device.cuh"
#include "ops/refuse.hpp"
#include "runtime/cuda.hpp"

namespace agmm {

namespace {

using namespace quantizing;

bool is_aligned(void const* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

/// Quantises each row by a CTA, or by a warp, which holds the row in registers between amax and
/// conversion: kKept vectors in each thread. What a longer row has beyond these is read again.
template <QuantizedTo to, class In, int kThreadsOfRow, int kKept>
__global__ void __launch_bounds__(kThreads) quantize_rows(Quantize const args) {
  using V = Vector<In>;
  __shared__ float room[kThreads / kWarp];
  constexpr int kRows = kThreads / kThreadsOfRow;  // of the CTA at a time
  int const lane = threadIdx.x % kThreadsOfRow;
  int const vectors = args.columns / V::kSize;
  // All threads of a CTA take equally many turns, since they meet in each.
  for (int64_t first = int64_t(blockIdx.x) * kRows; first < args.rows;
       first += int64_t(gridDim.x) * kRows) {
    int64_t const row = first + threadIdx.x / kThreadsOfRow;
    bool const is_there = row < args.rows;
    auto const* const x = static_cast<V const*>(args.x) + row * vectors;
    V kept[kKept];
    float amax = 0;
    if (is_there) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        int const at = lane + i * kThreadsOfRow;
        if (at < vectors) {
          kept[i] = x[at];
          amax = max_or_nan(amax, kept[i].amax());
        }
      }
      for (int at = lane + kKept * kThreadsOfRow; at < vectors; at += kThreadsOfRow) {
        amax = max_or_nan(amax, x[at].amax());
      }
    }
    amax = kThreadsOfRow == kWarp ? max_of_lanes<kWarp>(amax) : max_of_cta<kThreads>(amax, room);
    if (!is_there) continue;
    float const up = up_of<to>(amax, args.power_of_2);
    if (lane == 0) args.scales[row] = __frcp_rn(up);
    auto* const values = static_cast<uint8_t*>(args.values) + row * args.columns;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      int const at = lane + i * kThreadsOfRow;
      if (at < vectors) store<to>(kept[i], up, values + at * V::kSize);
    }
    for (int at = lane + kKept * kThreadsOfRow; at < vectors; at += kThreadsOfRow) {
      store<to>(x[at], up, values + at * V::kSize);
    }
  }
}

/// Quantises each scale block by threads that have one vector of it each.
template <QuantizedTo to, class In>
__global__ void __launch_bounds__(kThreads) quantize_blocks(Quantize const args) {
  using V = Vector<In>;
  constexpr int kLanes = kQuantizeBlock / V::kSize;
  static_assert(kLanes <= kWarp);
  constexpr int kBlocks = kThreads / kLanes;  // of the CTA at a time
  int const blocks_of_row = (args.columns + kQuantizeBlock - 1) / kQuantizeBlock;
  int const lane = threadIdx.x % kLanes;
  int64_t const blocks = args.rows * blocks_of_row;
  for (int64_t first = int64_t(blockIdx.x) * kBlocks; first < blocks;
       first += int64_t(gridDim.x) * kBlocks) {
    int64_t const block = first + threadIdx.x / kLanes;
    int64_t const row = block / blocks_of_row;
    int const column = static_cast<int>(block % blocks_of_row) * kQuantizeBlock + lane * V::kSize;
    bool const is_there = block < blocks && column < args.columns;
    int64_t const at = row * args.columns + column;
    V x{};
    if (is_there) x = *reinterpret_cast<V const*>(static_cast<In const*>(args.x) + at);
    float const up = up_of<to>(max_of_lanes<kLanes>(x.amax()), args.power_of_2);
    if (lane == 0 && block < blocks) args.scales[block] = __frcp_rn(up);
    if (is_there) store<to>(x, up, static_cast<uint8_t*>(args.values) + at);
  }
}

/// Quantises each 128 x 128 by a CTA, which holds them in registers between amax and conversion.
/// Numbers beyond the matrix count as 0.
template <QuantizedTo to, class In>
__global__ void __launch_bounds__(kThreads) quantize_squares(Quantize const args) {
  using V = Vector<In>;
  __shared__ float room[kThreads / kWarp];
  constexpr int kAcross = kQuantizeBlock / V::kSize;  // threads of a row
  constexpr int kDown = kThreads / kAcross;           // rows at a time
  constexpr int kKept = kQuantizeBlock / kDown;
  int const across = (args.columns + kQuantizeBlock - 1) / kQuantizeBlock;
  int64_t const squares = (args.rows + kQuantizeBlock - 1) / kQuantizeBlock * across;
  // All threads of a CTA take equally many turns, since they meet in each.
  for (int64_t square = blockIdx.x; square < squares; square += gridDim.x) {
    int64_t const first_row = square / across * kQuantizeBlock + threadIdx.x / kAcross;
    int const column = static_cast<int>(square % across) * kQuantizeBlock +
                       static_cast<int>(threadIdx.x) % kAcross * V::kSize;
    auto const is_there = [&](int64_t row) { return row < args.rows && column < args.columns; };
    V kept[kKept] = {};
    float amax = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      int64_t const row = first_row + i * kDown;
      if (is_there(row)) {
        auto const* const x = static_cast<In const*>(args.x) + row * args.columns + column;
        kept[i] = *reinterpret_cast<V const*>(x);
      }
      amax = max_or_nan(amax, kept[i].amax());
    }
    float const up = up_of<to>(max_of_cta<kThreads>(amax, room), args.power_of_2);
    if (threadIdx.x == 0) args.scales[square] = __frcp_rn(up);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      int64_t const row = first_row + i * kDown;
      if (!is_there(row)) continue;
      store<to>(kept[i], up, static_cast<uint8_t*>(args.values) + row * args.columns + column);
    }
  }
}

/// Finds the amax of the matrix. CTAs compare theirs as bits, which for numbers that are not
/// negative are in the same order; a NaN's are above all.
template <class In>
__global__ void __launch_bounds__(kThreads) matrix_amax(Quantize const args) {
  using V = Vector<In>;
  __shared__ float room[kThreads / kWarp];
  int64_t const vectors = args.rows * (args.columns / V::kSize);
  float amax = 0;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
       i += int64_t(gridDim.x) * kThreads) {
    amax = max_or_nan(amax, static_cast<V const*>(args.x)[i].amax());
  }
  amax = max_of_cta<kThreads>(amax, room);
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<uint32_t*>(args.amax), __float_as_uint(amax));
}

template <QuantizedTo to, class In>
__global__ void __launch_bounds__(kThreads) quantize_matrix(Quantize const args) {
  using V = Vector<In>;
  float const up = up_of<to>(*args.amax, args.power_of_2);
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.scales = __frcp_rn(up);
  int64_t const vectors = args.rows * (args.columns / V::kSize);
  auto* const values = static_cast<uint8_t*>(args.values);
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
       i += int64_t(gridDim.x) * kThreads) {
    store<to>(static_cast<V const*>(args.x)[i], up, values + i * V::kSize);
  }
}

template <class Kernel>
void launch(Kernel* kernel, int64_t ctas, Quantize const& args, cudaStream_t stream) {
  // A launch has at most as many CTAs as run at once, and as many more as hide that some end later
  // than others.
  constexpr int64_t kCtasPerSm = 16;
  int64_t const most = current_device().sm_count * kCtasPerSm;
  kernel<<<static_cast<unsigned>(std::min(ctas, most)), kThreads, 0, stream>>>(args);
  AGMM_CHECK_CUDA(cudaGetLastError());
}

/// The number of CTAs that have a thread for each vector.
template <class In>
int64_t ctas_of(Quantize const& args) {
  return (args.rows * (args.columns / Vector<In>::kSize) + kThreads - 1) / kThreads;
}

template <class In>
void find_amax_of_matrix(Quantize const& args, cudaStream_t stream) {
  AGMM_CHECK_CUDA(cudaMemsetAsync(args.amax, 0, sizeof(*args.amax), stream));
  launch(matrix_amax<In>, ctas_of<In>(args), args, stream);
}

template <QuantizedTo to, class In>
void quantize_from(Quantize const& args, cudaStream_t stream) {
  int const vectors = args.columns / Vector<In>::kSize;
  if (args.scale_of == ScaleOf::Row) {
    // Each case takes the fewest registers that hold the row.
    if (vectors <= 2 * kWarp) {
      launch(quantize_rows<to, In, kWarp, 2>, (args.rows + 7) / 8, args, stream);
    } else if (vectors <= 2 * kThreads) {
      launch(quantize_rows<to, In, kThreads, 2>, args.rows, args, stream);
    } else if (vectors <= 4 * kThreads) {
      launch(quantize_rows<to, In, kThreads, 4>, args.rows, args, stream);
    } else {
      launch(quantize_rows<to, In, kThreads, 8>, args.rows, args, stream);
    }
  } else if (args.scale_of == ScaleOf::Block) {
    int64_t const blocks = args.rows * ((args.columns + kQuantizeBlock - 1) / kQuantizeBlock);
    constexpr int kAtOnce = kThreads / (kQuantizeBlock / Vector<In>::kSize);
    launch(quantize_blocks<to, In>, (blocks + kAtOnce - 1) / kAtOnce, args, stream);
  } else if (args.scale_of == ScaleOf::Square) {
    int64_t const down = (args.rows + kQuantizeBlock - 1) / kQuantizeBlock;
    int const across = (args.columns + kQuantizeBlock - 1) / kQuantizeBlock;
    launch(quantize_squares<to, In>, down * across, args, stream);
  } else if (args.scale_of == ScaleOf::Column) {
    quantize_columns(args, stream);
  } else {
    if (!args.has_amax) find_amax_of_matrix<In>(args, stream);
    launch(quantize_matrix<to, In>, ctas_of<In>(args), args, stream);
  }
}

template <QuantizedTo to, class In>
void load_from() {
  load(quantize_rows<to, In, kWarp, 2>);
  load(quantize_rows<to, In, kThreads, 2>);
  load(quantize_rows<to, In, kThreads, 4>);
  load(quantize_rows<to, In, kThreads, 8>);
  load(quantize_blocks<to, In>);
  load(quantize_squares<to, In>);
  load(quantize_matrix<to, In>);
}

}  // namespace

void load_quantizers() {
  static std::mutex mutex;
  static std::set<int> loaded;  // devices
  std::lock_guard<std::mutex> const lock(mutex);
  int const device = small_kernels_device().index;
  if (loaded.count(device) != 0) return;
  for (QuantizedFrom const from :
       {QuantizedFrom::BFloat16, QuantizedFrom::Float16, QuantizedFrom::Float32}) {
    with_type(from, [](auto of_x) {
      using In = decltype(of_x);
      load_from<QuantizedTo::E4M3, In>();
      load_from<QuantizedTo::E5M2, In>();
      load(matrix_amax<In>);
    });
  }
  load_columns();
  loaded.insert(device);
}

namespace {

/// Whether the largest values are searched for before anything is quantised.
bool needs_amax(ScaleOf scale_of) {
  return scale_of == ScaleOf::Matrix || scale_of == ScaleOf::Column;
}

}  // namespace

void quantizing::check(Quantize const& args) {
  if (args.rows < 1 || args.columns < 1 || args.columns % kQuantizeMultiple != 0) {
    refuse("x", std::to_string(args.rows) + " rows of " + std::to_string(args.columns),
           "at least one row, and a multiple of " + std::to_string(kQuantizeMultiple) + " columns");
  }
  if (!is_aligned(args.x) || !is_aligned(args.values)) {
    refuse("x, values", "an address that is no multiple of 16 bytes", "one that is");
  }
  if (needs_amax(args.scale_of) && args.amax == nullptr) {
    refuse("amax", "null", "device memory");
  }
  if (args.leading != 0 && (args.leading < args.rows || args.leading % kQuantizeMultiple != 0)) {
    refuse("leading", std::to_string(args.leading) + " for " + std::to_string(args.rows) + " rows",
           "0, or a multiple of " + std::to_string(kQuantizeMultiple) + " that has room for them");
  }
  small_kernels_device();  // or a message that says why there are none
}

void quantize(Quantize const& args, void* stream) {
  check(args);
  with_type(args.from, [&](auto of_x) {
    using In = decltype(of_x);
    auto const on = static_cast<cudaStream_t>(stream);
    if (args.to == QuantizedTo::E4M3) {
      quantize_from<QuantizedTo::E4M3, In>(args, on);
    } else {
      quantize_from<QuantizedTo::E5M2, In>(args, on);
    }
  });
}

void find_amax(Quantize const& args, void* stream) {
  check(args);
  if (!needs_amax(args.scale_of)) {
    refuse("scale_of", "a row, a block or a square", "the matrix or a column");
  }
  auto const on = static_cast<cudaStream_t>(stream);
  if (args.scale_of == ScaleOf::Column) return find_amax_of_columns(args, on);
  with_type(args.from, [&](auto of_x) { find_amax_of_matrix<decltype(of_x)>(args, on); });
}

}  // namespace agmm
