#pragma once

#include <cstdint>

namespace agmm {

/// Per tile of out, for pictures: when the wait for A began and ended (with its first columns),
/// when the last columns were found to be there, when the last load was issued (nanoseconds of the
/// GPU's global timer), and the multiprocessor that computed it.
struct TileTimes {
  uint64_t wait_begin_ns;
  uint64_t wait_end_ns;
  uint64_t found_ns;
  uint64_t loads_end_ns;
  uint32_t sm;
  uint32_t reserved;
};

/// The same of a matmul + reduce-scatter: when the first and the last load were issued, when the
/// sum was computed, and when the tile had left, or, of an own tile, the others' sums were added.
struct ScatterTimes {
  uint64_t loads_begin_ns;
  uint64_t loads_end_ns;
  uint64_t computed_ns;
  uint64_t done_ns;
  uint32_t sm;
  uint32_t reserved;
};

}  // namespace agmm
