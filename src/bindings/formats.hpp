// What the bound specs of matmuls share: formats of operands, layouts, addresses.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "agmm/async_input_mm.hpp"
#include "agmm/problem.hpp"

namespace agmm {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

/// Whether B is column-major, and its leading dimension.
using BTuple = std::pair<bool, int64_t>;

inline BLayout layout(bool column_major) {
  return column_major ? BLayout::ColumnMajor : BLayout::RowMajor;
}

/// How the scales of fp8 operands lie: what Scales says, without the addresses.
struct ScaleLayout {
  bool a_per_row = false;  // else one for all rows
  int a_columns = 1;       // scales of a row of A
  bool b_per_column = false;
  int b_k_stride = 0;
  int b_n_stride = 0;

  Scales scales() const {
    Scales found;
    found.a_per_row = a_per_row;
    found.b_per_column = b_per_column;
    found.b_k_stride = b_k_stride;
    found.b_n_stride = b_n_stride;
    return found;
  }
};

/// What the elements of a product are, and how its sums are accumulated and scaled.
struct Format {
  DType dtype = DType::BFloat16;
  Accumulation accumulation = Accumulation::Fast;
  std::optional<ScaleLayout> scales;  // of fp8 operands, and of no others

  Format(DType dtype_, Accumulation accumulation_, std::optional<ScaleLayout> scales_)
      : dtype(dtype_), accumulation(accumulation_), scales(scales_) {
    std::string const name = to_string(dtype);
    if (is_fp8(dtype) != scales.has_value()) {
      throw std::invalid_argument(is_fp8(dtype)
                                      ? "scales: found none, wanted their layout for " + name
                                      : "scales: found some, wanted none for " + name);
    }
    if (!is_fp8(dtype) && accumulation != Accumulation::Fast) {
      throw std::invalid_argument("accumulation: found " + std::string(to_string(accumulation)) +
                                  ", wanted fast for " + name);
    }
  }

  /// The scales' layout with null addresses; a default Scales for operands that need no scales.
  Scales scale_layout() const { return scales ? scales->scales() : Scales{}; }

  std::string str() const {
    std::string const name = to_string(dtype);
    return is_fp8(dtype) ? name + " " + to_string(accumulation) : name;
  }
};

/// The epilogue that a caller's activation wants, by its name: "silu" of each sum, "silu_mul" of a
/// gate. No name is Epilogue::Bias. quantizes: whether a gate's result is fp8.
/// Throws std::invalid_argument for the name of nothing.
struct NamedEpilogue {
  Epilogue epilogue = Epilogue::Bias;
  Activation activation = Activation::Relu;

  explicit NamedEpilogue(std::string const& name, bool quantizes = false) {
    find(name);
    if (!quantizes) return;
    if (epilogue != Epilogue::Gate) {
      throw std::invalid_argument("activation: found '" + name +
                                  "' with a quantised result, wanted a gated one");
    }
    epilogue = Epilogue::GateFp8;
  }

 private:
  void find(std::string const& name) {
    if (name.empty()) return;
    std::string const suffix = "_mul";
    bool const is_gated = name.size() > suffix.size() &&
                          name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
    std::string const of_one = is_gated ? name.substr(0, name.size() - suffix.size()) : name;
    for (Activation const one : {Activation::Relu, Activation::Relu2, Activation::Gelu,
                                 Activation::GeluTanh, Activation::Silu}) {
      if (of_one != to_string(one)) continue;
      epilogue = is_gated ? Epilogue::Gate : Epilogue::Activation;
      activation = one;
      return;
    }
    throw std::invalid_argument("activation: found '" + name + "', wanted one that kernels have");
  }

 public:
  /// The columns of B for so many columns of each weight. Throws std::invalid_argument where they
  /// are too many to count.
  int32_t columns_of_b(int32_t n) const {
    int32_t const weights = columns_per_out(epilogue);
    if (n > kMaxSize / weights) {
      throw std::invalid_argument("B: found N=" + std::to_string(n) + ", wanted at most " +
                                  std::to_string(kMaxSize / weights));
    }
    return weights * n;
  }
};

/// The addresses of a call's tensors, in the order in which its spec wants them; 0 is none.
class Addresses {
 public:
  Addresses(std::vector<uintptr_t> const& at, std::size_t wanted) : at_(at) {
    if (at.size() != wanted) {
      throw std::invalid_argument("addresses: found " + std::to_string(at.size()) + ", wanted " +
                                  std::to_string(wanted));
    }
  }

  template <class T>
  T* next() {
    return pointer<T>(at_[i_++]);
  }

 private:
  std::vector<uintptr_t> const& at_;
  std::size_t i_ = 0;
};

}  // namespace agmm
