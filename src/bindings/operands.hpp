// How matmuls' operands come from Python.
#pragma once

#include <cstdint>
#include <tuple>

#include "agmm/problem.hpp"

namespace agmm {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline BLayout layout(bool column_major) {
  return column_major ? BLayout::ColumnMajor : BLayout::RowMajor;
}

// The scales of B: where they are, whether there is one for each column, and of blocks the elements
// between those of neighbouring blocks of K and of columns
using WeightScalesTuple = std::tuple<uintptr_t, bool, int, int>;

// scale_a, whether there is one for each row, those of B
using ScalesTuple = std::tuple<uintptr_t, bool, WeightScalesTuple>;

}  // namespace agmm
