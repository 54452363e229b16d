// The structs that describe a problem and how it is to be computed. They are plain data, and print
// themselves.
#pragma once

#include <cstdint>
#include <string>

#include "agmm/fields.hpp"

namespace agmm {

/// The architecture that the matmul kernels of this build are compiled for, and the compute
/// capability of the GPUs that run it.
constexpr char kArchitecture[] = "sm_90a";
constexpr int kCapabilityMajor = 9;
constexpr int kCapabilityMinor = 0;
/// The least compute capability that runs the other kernels: collectives, quantisers, copies.
constexpr int kLeastCapabilityMajor = 8;
constexpr int kLeastCapabilityMinor = 0;
/// TMA wants strides that are multiples of 16 bytes, and so of this many elements of 16 bits.
constexpr int32_t kAlignment = 8;

/// The element types of A and B; fp8 types name A's, then B's. The result has A's type, or BFloat16
/// where the operands are fp8.
enum class DType : int32_t { BFloat16 = 0, Float16 = 1, E4M3 = 2, E4M3ByE5M2 = 3, E5M2ByE4M3 = 4 };
/// How sums of fp8 products are accumulated: by the tensor cores, with fewer bits than float32 has
/// (Fast), or promoted to float32 every 128 of K (Slow). Block scales are applied at that
/// promotion: each covers 128 of K of a row of A, and of 128 columns of B (Block) or of one column
/// (Block1x128). Other types have Fast alone, which loses nothing there.
enum class Accumulation : int32_t { Fast = 0, Slow = 1, Block = 2, Block1x128 = 3 };
/// The size of a scale block, along K and along columns.
constexpr int32_t kScaleBlock = 128;
enum class BLayout : int32_t { RowMajor = 0, ColumnMajor = 1 };
/// The op that a kernel is for. Kernels that scatter or reduce send tiles to other ranks; those of
/// MatmulAllReduce send finished tiles too. A grouped matmul is of one rank alone.
enum class Op : int32_t {
  AllGatherMatmul = 0,
  MatmulReduceScatter = 1,
  MatmulAllReduce = 2,
  GroupedMatmul = 3
};
/// The epilogue of a kernel: what is done with the sums, which are scaled where the operands have
/// scales. Bias adds a bias, or none. Activation adds it and computes an activation of each sum.
/// Gate has the sums of two weights: the activation of those of the first, gate, times those of the
/// second, up, each behind its bias. GateFp8 is Gate whose result is e4m3, with a scale for each
/// kScaleBlock columns of a row, or one that is given.
enum class Epilogue : int32_t { Bias = 0, Activation = 1, Gate = 2, GateFp8 = 3 };
/// A function of one sum, which all epilogues but Bias take when they run.
enum class Activation : int32_t { Relu = 0, Relu2 = 1, Gelu = 2, GeluTanh = 3, Silu = 4 };
/// How a kernel's warps share their work. Streaming kernels are for few rows: they read B as fast
/// as memory gives it (src/order/streaming.hpp).
enum class Schedule : int32_t { Cooperative = 0, Pingpong = 1, Streaming = 2 };
/// The direction in which neighbouring tiles of out follow one another.
enum class Raster : int32_t { AlongM = 0, AlongN = 1 };

/// How many columns of B become one column of out.
constexpr int32_t columns_per_out(Epilogue e) {
  return e == Epilogue::Gate || e == Epilogue::GateFp8 ? 2 : 1;
}
/// Whether the result is fp8, with scales.
constexpr bool quantizes(Epilogue e) { return e == Epilogue::GateFp8; }
constexpr bool is_block_scaled(Accumulation a) {
  return a == Accumulation::Block || a == Accumulation::Block1x128;
}
constexpr bool is_fp8(DType d) { return d != DType::BFloat16 && d != DType::Float16; }
constexpr int32_t element_bytes(DType d) { return is_fp8(d) ? 1 : 2; }  // of A
/// The number of elements of which K and the leading dimension of B are multiples. N is too where B
/// is row-major; otherwise it is a multiple of 8.
constexpr int32_t alignment_of(DType d) { return is_fp8(d) ? 16 : kAlignment; }

inline char const* to_string(DType d) {
  switch (d) {
    case DType::BFloat16:
      return "bf16";
    case DType::Float16:
      return "fp16";
    case DType::E4M3:
      return "e4m3";
    case DType::E4M3ByE5M2:
      return "e4m3_e5m2";
    case DType::E5M2ByE4M3:
      return "e5m2_e4m3";
  }
  return "?";
}
inline char const* to_string(Accumulation a) {
  switch (a) {
    case Accumulation::Fast:
      return "fast";
    case Accumulation::Slow:
      return "slow";
    case Accumulation::Block:
      return "block";
    case Accumulation::Block1x128:
      return "block_1x128";
  }
  return "?";
}
inline char const* to_string(Op op) {
  switch (op) {
    case Op::AllGatherMatmul:
      return "all_gather_matmul";
    case Op::MatmulReduceScatter:
      return "matmul_reduce_scatter";
    case Op::MatmulAllReduce:
      return "matmul_all_reduce";
    case Op::GroupedMatmul:
      return "grouped_matmul";
  }
  return "?";
}
inline char const* to_string(Epilogue e) {
  switch (e) {
    case Epilogue::Bias:
      return "bias";
    case Epilogue::Activation:
      return "activation";
    case Epilogue::Gate:
      return "gate";
    case Epilogue::GateFp8:
      return "gate_fp8";
  }
  return "?";
}
inline char const* to_string(Activation a) {
  switch (a) {
    case Activation::Relu:
      return "relu";
    case Activation::Relu2:
      return "relu2";
    case Activation::Gelu:
      return "gelu";
    case Activation::GeluTanh:
      return "gelu_tanh";
    case Activation::Silu:
      return "silu";
  }
  return "?";
}
inline char const* to_string(BLayout l) { return l == BLayout::RowMajor ? "row" : "col"; }
inline char const* to_string(Schedule s) {
  switch (s) {
    case Schedule::Cooperative:
      return "cooperative";
    case Schedule::Pingpong:
      return "pingpong";
    case Schedule::Streaming:
      return "streaming";
  }
  return "?";
}
inline char const* to_string(Raster r) { return r == Raster::AlongM ? "along_m" : "along_n"; }

/// The largest M, N and K: with the sizes of tiles and clusters added they still fit into 32 bits.
constexpr int32_t kMaxSize = INT32_MAX - (1 << 16);

/// The problem out[m, out_columns()] = epilogue(A[m, k] @ B[k, n]); the epilogue adds bias[n]. With
/// a gate the columns of B are those of gate, then those of up.
struct Problem {
  int32_t m = 0;
  int32_t n = 0;
  int32_t k = 0;
  DType dtype = DType::BFloat16;
  BLayout b_layout = BLayout::ColumnMajor;
  Accumulation accumulation = Accumulation::Fast;
  Epilogue epilogue = Epilogue::Bias;
  Activation activation = Activation::Relu;  // of an epilogue that has one

  constexpr int32_t out_columns() const { return n / columns_per_out(epilogue); }

  std::string str() const {
    std::string words = std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k) +
                        " " + to_string(dtype) + " B " + to_string(b_layout);
    if (is_fp8(dtype)) words += std::string(" ") + to_string(accumulation);
    if (epilogue != Epilogue::Bias) words += std::string(" ") + to_string(epilogue);
    return words;
  }
};

/// What a kernel is compiled with: the tile that one CTA computes, the cluster, the
/// warp-specialised schedule.
struct KernelShape {
  int32_t tile_m = 128;
  int32_t tile_n = 128;
  int32_t tile_k = 64;
  int32_t cluster_m = 1;
  int32_t cluster_n = 1;
  Schedule schedule = Schedule::Pingpong;
  bool timed = false;  // records agmm::TileTimes; a variant for pictures, never chosen
  // Whether the product is computed transposed: the rows of a tile are columns of the MMA, of which
  // it has any multiple of 8, and the tile's columns are its rows, a multiple of 64.
  bool swapped = false;

  std::string str() const {
    return std::to_string(tile_m) + "x" + std::to_string(tile_n) + "x" + std::to_string(tile_k) +
           "_" + std::to_string(cluster_m) + "x" + std::to_string(cluster_n) + "_" +
           to_string(schedule) + (swapped ? "_swapped" : "") + (timed ? "_timed" : "");
  }
};
AGMM_FIELDS(KernelShape, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, timed, swapped);
inline bool operator==(KernelShape const& a, KernelShape const& b) {
  return fields_of(a) == fields_of(b);
}

/// What a kernel is for, and what it can do.
struct KernelFacts {
  KernelShape shape{};
  DType dtype = DType::BFloat16;
  BLayout b_layout = BLayout::ColumnMajor;
  bool can_split = false;    // KernelConfig::splits above 1
  bool can_store_a = false;  // Operands::a_out
  char const* architecture = kArchitecture;
  Accumulation accumulation = Accumulation::Fast;
  Op op = Op::AllGatherMatmul;
  Epilogue epilogue = Epilogue::Bias;
};

/// A kernel shape and what may change from launch to launch.
struct KernelConfig {
  KernelShape shape{};
  int32_t max_swizzle = 1;
  Raster raster = Raster::AlongM;
  int32_t splits = 1;  // of K: the number of CTAs that compute a tile together
  /// Whether one order of tiles goes over all rows of A, not chunk after chunk, so that tiles that
  /// share columns of B come together. Calls of one wave always have such an order, since all their
  /// tiles wait at once.
  bool across = false;
};
AGMM_FIELDS(KernelConfig, shape, max_swizzle, raster, splits, across);

}  // namespace agmm
