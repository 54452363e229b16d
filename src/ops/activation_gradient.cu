// Memory: a thread reads the vectors at its own places of grad_out, gate and up, each once and past
// L1, and writes those of the gradients at the same places. So no thread reads what another one of
// the launch writes, and nothing has to be ordered but the launch itself, which the stream does.
// The exception is the largest value of a scale, which the lanes of a block exchange by shuffles
// and the warps of a row by shared memory, between barriers. An element of a gate costs 6 bytes
// read and 4 written (2 more with fp8), and 32 to 47 instructions, by the activation. An H200
// issues some 6 of a thread in the time of a byte of its memory, so memory bounds it.
#include "ops/activation_gradient.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>

#include "gemm/sm90/activations.hpp"
#include "ops/quantize_device.cuh"
#include "ops/refuse.hpp"
#include "runtime/cuda.hpp"
#include "runtime/load_kernel.hpp"

namespace agmm {

namespace {

using namespace quantizing;

constexpr int kSize = kGradientMultiple;  // of a vector
constexpr int kLanesOfBlock = kQuantizeBlock / kSize;

// --- one number ---

// Neither of these two flushes subnormal numbers, with which tails of torch's end.
__device__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kRootOf2OverPi = 0.7978845608028654f;

/// A function and its derivative at one place.
struct Point {
  float value;
  float slope;
};

template <Activation kActivation>
__device__ Point point_at(float x) {
  if constexpr (kActivation == Activation::Silu) {
    float const sigmoid = reciprocal(1.0f + exp2_of(-kLog2E * x));
    return {x * sigmoid, sigmoid * (1.0f + x * (1.0f - sigmoid))};
  } else if constexpr (kActivation == Activation::Gelu) {
    constexpr float kRootOfHalf = 0.7071067811865476f;
    constexpr float kDensity = 0.3989422804014327f;  // of the normal distribution at 0
    float const twice = 1.0f + erff(x * kRootOfHalf);
    float const density = kDensity * exp2_of(-0.5f * kLog2E * (x * x));
    return {0.5f * x * twice, 0.5f * twice + x * density};
  } else {
    static_assert(kActivation == Activation::GeluTanh);
    constexpr float kCubic = 0.044715f;
    float const square = x * x;
    float const inner = kRootOf2OverPi * (x + kCubic * (square * x));
    float const past = reciprocal(1.0f + exp2_of(2.0f * kLog2E * fabsf(inner)));
    float const tanh = copysignf(1.0f - 2.0f * past, inner);
    float const half = 0.5f * x;
    float const slope_of_inner = kRootOf2OverPi * (1.0f + 3.0f * kCubic * square);
    return {half * (1.0f + tanh),
            0.5f * (1.0f + tanh) + half * (1.0f - tanh * tanh) * slope_of_inner};
  }
}

constexpr bool is_relu(Activation activation) {
  return activation == Activation::Relu || activation == Activation::Relu2;
}

/// The gradient of x for that of the activation's result. Where x is not positive, that of a relu
/// is 0 whatever `of_result` is.
template <Activation kActivation>
__device__ float gradient_of(float of_result, float x) {
  if constexpr (kActivation == Activation::Relu) {
    return x <= 0 ? 0.0f : of_result;
  } else if constexpr (kActivation == Activation::Relu2) {
    return x <= 0 ? 0.0f : of_result * (2.0f * x);
  } else {
    return of_result * point_at<kActivation>(x).slope;
  }
}

// --- vectors ---

template <class In>
__device__ uint32_t packed(float a, float b) {
  uint32_t found;
  if constexpr (std::is_same_v<In, __half>) {
    __half2 const pair = __floats2half2_rn(a, b);
    memcpy(&found, &pair, sizeof(found));
  } else {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(a, b);
    memcpy(&found, &pair, sizeof(found));
  }
  return found;
}

template <class In>
__device__ void round_into(Vector<In>& vector, float const (&from)[kSize]) {
  vector.bits = make_uint4(packed<In>(from[0], from[1]), packed<In>(from[2], from[3]),
                           packed<In>(from[4], from[5]), packed<In>(from[6], from[7]));
}

/// The vector of a row, which nobody reads again: the place in L2 is for what is written.
template <class In>
__device__ Vector<In> vector_of(Rows const& rows, int64_t row, int64_t column) {
  auto const* const at = static_cast<In const*>(rows.at) + row * rows.stride + column;
  return {__ldcs(reinterpret_cast<uint4 const*>(at))};
}

template <class In>
__device__ void write(Rows const& rows, int64_t row, int64_t column, Vector<In> const& vector) {
  auto* const at = static_cast<In*>(rows.at) + row * rows.stride + column;
  *reinterpret_cast<uint4*>(at) = vector.bits;
}

/// The gradients of gate and up at one place.
template <class In>
struct Pair {
  Vector<In> of_gate, of_up;

  __device__ float amax() const { return max_or_nan(of_gate.amax(), of_up.amax()); }
};

template <class In>
__device__ Pair<In> gated_gradients(ActivationGradient const& args, int64_t row, int64_t column) {
  Vector<In> const out = vector_of<In>(args.grad_out, row, column);
  Vector<In> const gate = vector_of<In>(args.gate, row, column);
  Vector<In> const up = vector_of<In>(args.up, row, column);
  float of_gate[kSize], of_up[kSize];
  with_activation(args.activation, [&](auto constant) {
    constexpr Activation kActivation = decltype(constant)::value;
    if constexpr (!is_relu(kActivation)) {  // of which there is no gate
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        Point const point = point_at<kActivation>(gate[i]);
        of_gate[i] = out[i] * up[i] * point.slope;
        of_up[i] = out[i] * point.value;
      }
    }
  });
  Pair<In> found;
  round_into(found.of_gate, of_gate);
  round_into(found.of_up, of_up);
  write(args.grad_gate, row, column, found.of_gate);
  write(args.grad_up, row, column, found.of_up);
  return found;
}

template <class In>
__device__ void plain_gradient(ActivationGradient const& args, int64_t row, int64_t column) {
  Vector<In> const out = vector_of<In>(args.grad_out, row, column);
  Vector<In> const x = vector_of<In>(args.gate, row, column);
  float found[kSize];
  with_activation(args.activation, [&](auto constant) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      found[i] = gradient_of<decltype(constant)::value>(out[i], x[i]);
    }
  });
  Vector<In> rounded;
  round_into(rounded, found);
  write(args.grad_gate, row, column, rounded);
}

// --- kernels ---

/// Has a thread for each vector. A thread finds its first place by a division, and the others by
/// adding what the launch steps over, in whole rows and the columns that are left.
template <class In, bool kIsGated>
__global__ void __launch_bounds__(kThreads) gradients(ActivationGradient const args) {
  int64_t const vectors = args.columns / kSize;
  int64_t const first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  int64_t const step = int64_t(gridDim.x) * kThreads;
  int64_t const rows_of_step = step / vectors;
  int64_t const rest_of_step = step % vectors;
  int64_t row = first / vectors;
  int64_t vector = first % vectors;
  while (row < args.rows) {
    if constexpr (kIsGated) {
      gated_gradients<In>(args, row, vector * kSize);
    } else {
      plain_gradient<In>(args, row, vector * kSize);
    }
    row += rows_of_step;
    vector += rest_of_step;
    if (vector >= vectors) {
      vector -= vectors;
      ++row;
    }
  }
}

template <class In>
__device__ void store_at(QuantizedTo to, Vector<In> const& x, float up, uint8_t* at) {
  if (to == QuantizedTo::E4M3) {
    store<QuantizedTo::E4M3>(x, up, at);
  } else {
    store<QuantizedTo::E5M2>(x, up, at);
  }
}

__device__ float up_for(ActivationGradient const& args, float amax) {
  return args.to == QuantizedTo::E4M3 ? up_of<QuantizedTo::E4M3>(amax, args.power_of_2)
                                      : up_of<QuantizedTo::E5M2>(amax, args.power_of_2);
}

/// The number `of_up` of the gradients in a row of `values`.
__device__ uint8_t* values_of(ActivationGradient const& args, int64_t row, bool of_up) {
  return static_cast<uint8_t*>(args.values) + (2 * row + (of_up ? 1 : 0)) * args.columns;
}

/// Quantises each row of both gradients by a CTA, which holds them in registers between the largest
/// value and the conversion: kKept vectors of each in a thread.
template <class In, int kThreadsOfRow, int kKept>
__global__ void __launch_bounds__(kThreadsOfRow) gradients_and_rows(ActivationGradient const args) {
  __shared__ float room[kThreadsOfRow / kWarp];
  int const vectors = args.columns / kSize;
  // All threads of a CTA take equally many turns, since they meet in each.
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    Pair<In> kept[kKept];
    float amax = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      int const vector = threadIdx.x + i * kThreadsOfRow;
      if (vector < vectors) {
        kept[i] = gated_gradients<In>(args, row, vector * kSize);
        amax = max_or_nan(amax, kept[i].amax());
      }
    }
    float const up = up_for(args, max_of_cta<kThreadsOfRow>(amax, room));
    if (threadIdx.x == 0) args.scales[row] = __frcp_rn(up);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      int const vector = threadIdx.x + i * kThreadsOfRow;
      if (vector < vectors) {
        store_at(args.to, kept[i].of_gate, up, values_of(args, row, false) + vector * kSize);
        store_at(args.to, kept[i].of_up, up, values_of(args, row, true) + vector * kSize);
      }
    }
  }
}

/// Quantises scale blocks, one of each gradient, by lanes that have one vector of each.
template <class In>
__global__ void __launch_bounds__(kThreads) gradients_and_blocks(ActivationGradient const args) {
  constexpr int kBlocks = kThreads / kLanesOfBlock;  // of the CTA at a time
  int const blocks_of_row = args.columns / kQuantizeBlock;
  int const lane = threadIdx.x % kLanesOfBlock;
  int64_t const blocks = args.rows * blocks_of_row;
  // All lanes of a warp take equally many turns, since they meet in each.
  for (int64_t first = int64_t(blockIdx.x) * kBlocks; first < blocks;
       first += int64_t(gridDim.x) * kBlocks) {
    int64_t const block = first + threadIdx.x / kLanesOfBlock;
    bool const is_there = block < blocks;
    int64_t const row = block / blocks_of_row;
    int const of_row = static_cast<int>(block % blocks_of_row);
    int const column = of_row * kQuantizeBlock + lane * kSize;
    Pair<In> found{};
    if (is_there) found = gated_gradients<In>(args, row, column);
    float const up_of_gate = up_for(args, max_of_lanes<kLanesOfBlock>(found.of_gate.amax()));
    float const up_of_up = up_for(args, max_of_lanes<kLanesOfBlock>(found.of_up.amax()));
    if (!is_there) continue;
    if (lane == 0) {
      float* const scales = args.scales + 2 * row * blocks_of_row + of_row;
      scales[0] = __frcp_rn(up_of_gate);
      scales[blocks_of_row] = __frcp_rn(up_of_up);
    }
    store_at(args.to, found.of_gate, up_of_gate, values_of(args, row, false) + column);
    store_at(args.to, found.of_up, up_of_up, values_of(args, row, true) + column);
  }
}

// --- launches ---

template <class Kernel>
void launch(Kernel* kernel, int threads, int64_t ctas, ActivationGradient const& args,
            cudaStream_t stream) {
  // A launch has at most as many CTAs as run at once, and as many more as hide that some end later
  // than others.
  constexpr int64_t kThreadsPerSm = 4096;
  int64_t const most = current_device().sm_count * kThreadsPerSm / threads;
  kernel<<<static_cast<unsigned>(std::min(ctas, most)), threads, 0, stream>>>(args);
  AGMM_CHECK_CUDA(cudaGetLastError());
}

template <class In>
void launch_rows(ActivationGradient const& args, cudaStream_t stream) {
  int const vectors = args.columns / kSize;
  constexpr int kMost = 1024;  // threads
  // Each case takes the fewest registers that hold the row.
  if (vectors <= kThreads) {
    launch(gradients_and_rows<In, kThreads, 1>, kThreads, args.rows, args, stream);
  } else if (vectors <= 2 * kThreads) {
    launch(gradients_and_rows<In, kThreads, 2>, kThreads, args.rows, args, stream);
  } else if (vectors <= 4 * kThreads) {
    launch(gradients_and_rows<In, 2 * kThreads, 2>, 2 * kThreads, args.rows, args, stream);
  } else {
    static_assert(kMostQuantizedColumns == 2 * kMost * kSize);
    launch(gradients_and_rows<In, kMost, 2>, kMost, args.rows, args, stream);
  }
}

template <class In>
void launch_all(ActivationGradient args, cudaStream_t stream) {
  if (args.values != nullptr && args.scale_of == ScaleOf::Row) return launch_rows<In>(args, stream);
  if (args.values != nullptr) {
    int64_t const blocks = args.rows * (args.columns / kQuantizeBlock);
    constexpr int64_t kAtOnce = kThreads / kLanesOfBlock;
    int64_t const ctas = (blocks + kAtOnce - 1) / kAtOnce;
    return launch(gradients_and_blocks<In>, kThreads, ctas, args, stream);
  }
  int64_t const ctas = (args.rows * (args.columns / kSize) + kThreads - 1) / kThreads;
  bool const is_gated = args.up.at != nullptr;
  auto* const kernel = is_gated ? gradients<In, true> : gradients<In, false>;
  launch(kernel, kThreads, ctas, args, stream);
}

template <class In>
void load_all() {
  load(gradients<In, true>);
  load(gradients<In, false>);
  load(gradients_and_rows<In, kThreads, 1>);
  load(gradients_and_rows<In, kThreads, 2>);
  load(gradients_and_rows<In, 2 * kThreads, 2>);
  load(gradients_and_rows<In, 1024, 2>);
  load(gradients_and_blocks<In>);
}

bool is_readable(Rows const& rows) {
  return reinterpret_cast<uintptr_t>(rows.at) % 16 == 0 && rows.stride % kSize == 0;
}

void check(ActivationGradient const& args) {
  if (args.rows < 1 || args.columns < 1 || args.columns % kSize != 0) {
    refuse("gate", std::to_string(args.rows) + " rows of " + std::to_string(args.columns),
           "at least one row, and a multiple of " + std::to_string(kSize) + " columns");
  }
  bool const is_gated = args.up.at != nullptr;
  if (is_gated && is_relu(args.activation)) {
    refuse("activation", to_string(args.activation), "one that has a gate");
  }
  if (args.grad_out.at == nullptr || args.gate.at == nullptr || args.grad_gate.at == nullptr ||
      is_gated != (args.grad_up.at != nullptr)) {
    refuse("grad_out, gate, grad_gate, grad_up", "null", "device memory");
  }
  for (Rows const* const each :
       {&args.grad_out, &args.gate, &args.up, &args.grad_gate, &args.grad_up}) {
    if (!is_readable(*each)) {
      refuse("grad_out, gate, up", "rows that begin at no multiple of 16 bytes", "those that do");
    }
  }
  if (is_fp8(args.dtype)) refuse("dtype", to_string(args.dtype), "bfloat16 or float16");
  if (args.values != nullptr) {
    bool const fits = args.scale_of == ScaleOf::Row
                          ? args.columns <= kMostQuantizedColumns
                          : args.scale_of == ScaleOf::Block && args.columns % kQuantizeBlock == 0;
    if (!fits || !is_gated || args.scales == nullptr) {
      refuse("values", std::to_string(args.columns) + " columns",
             "a gate, and at most " + std::to_string(kMostQuantizedColumns) +
                 " columns with a scale for each row, a multiple of " +
                 std::to_string(kQuantizeBlock) + " with one for each block");
    }
  }
  small_kernels_device();  // or a message that says why there are none
}

}  // namespace

void load_activation_gradients() {
  static std::mutex mutex;
  static std::set<int> loaded;  // devices
  std::lock_guard<std::mutex> const lock(mutex);
  int const device = small_kernels_device().index;
  if (loaded.count(device) != 0) return;
  load_all<__nv_bfloat16>();
  load_all<__half>();
  loaded.insert(device);
}

void activation_gradient(ActivationGradient const& args, void* stream) {
  check(args);
  auto const on = static_cast<cudaStream_t>(stream);
  if (args.dtype == DType::Float16) {
    launch_all<__half>(args, on);
  } else {
    launch_all<__nv_bfloat16>(args, on);
  }
}

}  // namespace agmm
