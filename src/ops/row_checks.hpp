// What the calls that move rows of tokens check alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "agmm/problem.hpp"
#include "ops/refuse.hpp"

namespace agmm {

inline void check_between(char const* argument, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) {
    refuse(argument, std::to_string(value), std::to_string(least) + " to " + std::to_string(most));
  }
}

inline void check_address(char const* argument, void const* pointer, int64_t alignment) {
  if (pointer == nullptr) refuse(argument, "null", "device memory");
  if (reinterpret_cast<uintptr_t>(pointer) % std::size_t(alignment) != 0) {
    refuse(argument, "an address that is no multiple of " + std::to_string(alignment) + " bytes",
           "one that is");
  }
}

inline void check_row_bytes(int64_t bytes) {
  if (bytes < 16 || bytes % 16 != 0) {
    refuse("row", std::to_string(bytes) + " bytes", "a multiple of 16");
  }
}

inline int64_t total(std::vector<int32_t> const& counts) {
  int64_t all = 0;
  for (int32_t const count : counts) all += count;
  return all;
}

inline std::string in_words(std::vector<int32_t> const& counts) {
  std::string words;
  for (int32_t const count : counts) words += std::to_string(count) + " ";
  return words;
}

inline void check_counts(std::vector<int32_t> const& counts, std::size_t ranks) {
  if (counts.size() != ranks) {
    refuse("tokens_per_rank", std::to_string(counts.size()) + " numbers", std::to_string(ranks));
  }
  for (int32_t const count : counts) check_between("tokens_per_rank", count, 0, kMaxSize);
  check_between("tokens", total(counts), 1, kMaxSize);
}

}  // namespace agmm
