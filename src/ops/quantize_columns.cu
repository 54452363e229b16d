#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ops/quantize_device.cuh"
#include "ops/refuse.hpp"
#include "runtime/cuda.hpp"

namespace agmm {

namespace quantizing {

namespace {

constexpr int kCtasPerSm = 8;

/// The number of CTAs that share the rows, where `across` CTAs share the columns: as many as fill
/// the GPU, at most one for each stretch of rows.
unsigned ctas_down(int64_t stretches, int64_t across) {
  int64_t const most = std::max<int64_t>(1, current_device().sm_count * kCtasPerSm / across);
  return static_cast<unsigned>(std::min({stretches, most, int64_t{65535}}));
}

/// Finds the amax of each column. Each lane of a warp has a vector of columns, and warps take turns
/// of kAhead rows.
template <class In>
__global__ void __launch_bounds__(kThreads) column_amax(Quantize const args) {
  using V = Vector<In>;
  constexpr int kWarps = kThreads / kWarp;
  __shared__ float room[kWarps][kWarp * V::kSize];
  int const lane = threadIdx.x % kWarp;
  int const warp = threadIdx.x / kWarp;
  int const first_column = int(blockIdx.x) * kWarp * V::kSize;
  int const vectors = args.columns / V::kSize;
  int const vector = first_column / V::kSize + lane;
  float amax[V::kSize] = {};
  if (vector < vectors) {
    auto const* const x = static_cast<V const*>(args.x) + vector;
    constexpr int kAhead = 4;  // loads under way
    int64_t const step = int64_t(gridDim.y) * kWarps * kAhead;
    for (int64_t row = (int64_t(blockIdx.y) * kWarps + warp) * kAhead; row < args.rows;
         row += step) {
      V loaded[kAhead] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (row + i < args.rows) loaded[i] = x[(row + i) * vectors];
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int j = 0; j < V::kSize; ++j) amax[j] = max_or_nan(amax[j], fabsf(loaded[i][j]));
      }
    }
  }
#pragma unroll
  for (int j = 0; j < V::kSize; ++j) room[warp][lane * V::kSize + j] = amax[j];
  __syncthreads();
  for (int i = threadIdx.x; i < kWarp * V::kSize; i += kThreads) {
    if (first_column + i >= args.columns) break;
    float found = room[0][i];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) found = max_or_nan(found, room[w][i]);
    // Numbers that are not negative are in the order of their bits; a NaN's are above all.
    atomicMax(reinterpret_cast<uint32_t*>(args.amax) + first_column + i, __float_as_uint(found));
  }
}

/// Quantises by columns to values that lie as x does. Each lane of a warp has a vector of columns,
/// and warps take turns of one row.
template <QuantizedTo to, class In>
__global__ void __launch_bounds__(kThreads) quantize_as_x_lies(Quantize const args) {
  using V = Vector<In>;
  constexpr int kWarps = kThreads / kWarp;
  int const warp = threadIdx.x / kWarp;
  int const vectors = args.columns / V::kSize;
  int const vector = int(blockIdx.x) * kWarp + threadIdx.x % kWarp;
  if (vector >= vectors) return;
  float up[V::kSize];
#pragma unroll
  for (int j = 0; j < V::kSize; ++j) {
    int const column = vector * V::kSize + j;
    up[j] = up_of<to>(args.amax[column], args.power_of_2);
    if (blockIdx.y == 0 && warp == 0) args.scales[column] = __frcp_rn(up[j]);
  }
  auto const* const x = static_cast<V const*>(args.x) + vector;
  auto* const values = static_cast<uint8_t*>(args.values) + vector * V::kSize;
  int64_t const step = int64_t(gridDim.y) * kWarps;
  for (int64_t row = int64_t(blockIdx.y) * kWarps + warp; row < args.rows; row += step) {
    V const loaded = x[row * vectors];
    uint32_t words[V::kSize / 4];
#pragma unroll
    for (int i = 0; i < V::kSize / 4; ++i) {
      words[i] = Fp8<to>::pair(loaded[4 * i] * up[4 * i], loaded[4 * i + 1] * up[4 * i + 1]) |
                 Fp8<to>::pair(loaded[4 * i + 2] * up[4 * i + 2], loaded[4 * i + 3] * up[4 * i + 3])
                     << 16;
    }
    auto* const at = values + row * args.columns;
    if constexpr (V::kSize == 8) {
      *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint32_t*>(at) = words[0];
    }
  }
}

/// What becomes of four numbers of a column, one below the other: four bytes.
template <QuantizedTo to, class In>
struct Quantized {
  using Element = In;
  __device__ static float factor(Quantize const& args, int column, bool writes) {
    float const up = up_of<to>(args.amax[column], args.power_of_2);
    if (writes) args.scales[column] = __frcp_rn(up);
    return up;
  }
  __device__ static uint32_t word(Vector<In> const (&rows)[4], int j, float up) {
    return Fp8<to>::pair(rows[0][j] * up, rows[1][j] * up) |
           Fp8<to>::pair(rows[2][j] * up, rows[3][j] * up) << 16;
  }
};

struct Bytes {
  using Element = uint8_t;
  __device__ static float factor(Quantize const&, int, bool) { return 0; }
  __device__ static uint32_t word(Vector<uint8_t> const (&rows)[4], int j, float) {
    auto const byte = [&](int i) {
      return uint32_t(reinterpret_cast<uint8_t const*>(&rows[i].bits)[j]);
    };
    return byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24;
  }
};

/// The tile that a CTA of transpose() has at a time.
template <class Element>
struct TransposedTile {
  static constexpr int kColumns = 64;
  static constexpr int kAcross = kColumns / Vector<Element>::kSize;  // threads
  static constexpr int kWords = kThreads / kAcross;                  // of a column
  static constexpr int kRows = 4 * kWords;
};

/// A CTA has some columns and goes down their rows in tiles. A thread makes words of four rows of a
/// vector of columns, and the CTA stores them column by column, by way of shared memory.
template <class Made>
__global__ void __launch_bounds__(kThreads) transpose(Quantize const args) {
  using V = Vector<typename Made::Element>;
  using Tile = TransposedTile<typename Made::Element>;
  constexpr int kColumns = Tile::kColumns;
  constexpr int kAcross = Tile::kAcross;
  constexpr int kWords = Tile::kWords;
  constexpr int kRows = Tile::kRows;
  // An odd pitch: threads that are words or columns apart meet no bank thrice.
  __shared__ uint32_t tile[kColumns][kWords + 1];
  __shared__ float factors[kColumns];
  int const first_column = int(blockIdx.x) * kColumns;
  if (threadIdx.x < kColumns && first_column + int(threadIdx.x) < args.columns) {
    factors[threadIdx.x] = Made::factor(args, first_column + int(threadIdx.x), blockIdx.y == 0);
  }
  __syncthreads();
  int const across = threadIdx.x % kAcross;
  int const down = threadIdx.x / kAcross;
  int const vectors = args.columns / V::kSize;
  int const vector = first_column / V::kSize + across;
  auto const* const x = static_cast<V const*>(args.x) + vector;
  auto* const values = static_cast<uint8_t*>(args.values);
  for (int64_t first = int64_t(blockIdx.y) * kRows; first < args.leading;
       first += int64_t(gridDim.y) * kRows) {
    int64_t const row = first + 4 * down;
    V loaded[4] = {};
    if (vector < vectors) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row + i < args.rows) loaded[i] = x[(row + i) * vectors];
      }
      // What is beyond the rows becomes zeros, also where the factor is a NaN.
      int64_t const left = args.rows - row;
      uint32_t const kept = left >= 4 ? 0xffffffffu : left <= 0 ? 0 : (1u << 8 * left) - 1;
#pragma unroll
      for (int j = 0; j < V::kSize; ++j) {
        int const column = across * V::kSize + j;
        tile[column][down] = Made::word(loaded, j, factors[column]) & kept;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kColumns * kWords; i += kThreads) {
      int const column = i / kWords;
      int64_t const at = first + 4 * (i % kWords);
      if (first_column + column < args.columns && at < args.leading) {
        *reinterpret_cast<uint32_t*>(values + (first_column + column) * args.leading + at) =
            tile[column][i % kWords];
      }
    }
    __syncthreads();  // before the tile is written again
  }
}

template <class Made>
void launch_transpose(Quantize const& args, cudaStream_t stream) {
  using Tile = TransposedTile<typename Made::Element>;
  unsigned const across = (args.columns + Tile::kColumns - 1) / Tile::kColumns;
  dim3 const grid(across, ctas_down((args.leading + Tile::kRows - 1) / Tile::kRows, across));
  transpose<Made><<<grid, kThreads, 0, stream>>>(args);
  AGMM_CHECK_CUDA(cudaGetLastError());
}

template <class In>
dim3 grid_of_vectors(Quantize const& args) {
  constexpr int kRowsOfWarp = 8;  // at least, for what a CTA does once
  constexpr int kColumns = kWarp * Vector<In>::kSize;
  constexpr int kWarps = kThreads / kWarp;
  unsigned const across = (args.columns + kColumns - 1) / kColumns;
  constexpr int64_t kRows = kWarps * kRowsOfWarp;
  return {across, ctas_down((args.rows + kRows - 1) / kRows, across)};
}

}  // namespace

void find_amax_of_columns(Quantize const& args, cudaStream_t stream) {
  AGMM_CHECK_CUDA(cudaMemsetAsync(args.amax, 0, args.columns * sizeof(*args.amax), stream));
  with_type(args.from, [&](auto of_x) {
    using In = decltype(of_x);
    column_amax<In><<<grid_of_vectors<In>(args), kThreads, 0, stream>>>(args);
  });
  AGMM_CHECK_CUDA(cudaGetLastError());
}

void quantize_columns(Quantize const& args, cudaStream_t stream) {
  if (!args.has_amax) find_amax_of_columns(args, stream);
  auto const enqueue = [&](auto to) {
    constexpr QuantizedTo kTo = decltype(to)::value;
    with_type(args.from, [&](auto of_x) {
      using In = decltype(of_x);
      if (args.leading != 0) return launch_transpose<Quantized<kTo, In>>(args, stream);
      quantize_as_x_lies<kTo, In><<<grid_of_vectors<In>(args), kThreads, 0, stream>>>(args);
      AGMM_CHECK_CUDA(cudaGetLastError());
    });
  };
  if (args.to == QuantizedTo::E4M3) {
    enqueue(std::integral_constant<QuantizedTo, QuantizedTo::E4M3>{});
  } else {
    enqueue(std::integral_constant<QuantizedTo, QuantizedTo::E5M2>{});
  }
}

void load_columns() {
  for (QuantizedFrom const from :
       {QuantizedFrom::BFloat16, QuantizedFrom::Float16, QuantizedFrom::Float32}) {
    with_type(from, [](auto of_x) {
      using In = decltype(of_x);
      load(column_amax<In>);
      load(quantize_as_x_lies<QuantizedTo::E4M3, In>);
      load(quantize_as_x_lies<QuantizedTo::E5M2, In>);
      load(transpose<Quantized<QuantizedTo::E4M3, In>>);
      load(transpose<Quantized<QuantizedTo::E5M2, In>>);
    });
  }
  load(transpose<Bytes>);
}

}  // namespace quantizing

void transpose_bytes(Quantize const& args, void* stream) {
  quantizing::check(args);
  if (args.leading == 0) refuse("leading", "0", "room for the rows");
  quantizing::launch_transpose<quantizing::Bytes>(args, static_cast<cudaStream_t>(stream));
}

}  // namespace agmm
