// The order of the rows that the experts of a rank multiply, from the ids of all ranks' tokens, in
// one launch that waits for nothing on another GPU.
#pragma once

#include <cstdint>

#include "order/grouped_tiles.hpp"

namespace agmm {

/// The element types of ids.
enum class RouteIds { Int32, Int64 };

/// The experts of a rank that a launch sorts by, and the ranks whose rows it counts: no more than a
/// CTA has threads.
constexpr int32_t kMostRoutedExperts = kMostExperts;

struct RowRoute {
  void const* ids = nullptr;  // [choices / k, k], contiguous
  RouteIds type = RouteIds::Int64;
  int64_t choices = 0;  // of all tokens of all ranks
  int32_t k = 1;        // of one token
  int32_t all_experts = 1;
  int32_t first = 0;               // the first expert of this rank
  int32_t experts = 1;             // of this rank, and of each other
  int64_t capacity = 0;            // rows that there is room for
  bool checks_capacity = false;    // whether more rows of any rank than that are an error
  int32_t* tokens = nullptr;       // [capacity]
  int32_t* row_choices = nullptr;  // [capacity]
  int32_t* counts = nullptr;       // [experts]
  int32_t* offsets = nullptr;      // [experts + 1]
  int32_t* positions = nullptr;    // [choices]
};

/// The most choices of all tokens, and the most rows of room, that route_rows() takes on the
/// current device. Throws std::runtime_error where there are no kernels for it.
int32_t most_routed_choices();

/// Loads the kernels of route_rows() on the current device, once; see load_kernels(). Throws
/// std::runtime_error where CUDA refuses.
void load_row_routes();

/// Enqueues the search for the order on the current device: rows are sorted by expert, inside an
/// expert by choice. An id that is too large, and more rows than there is room for where that is an
/// error, end in an assertion of the device. Throws std::invalid_argument for what does not fit,
/// std::runtime_error where CUDA refuses.
void route_rows(RowRoute const& args, void* stream);

}  // namespace agmm
