#pragma once

#include <cstdint>

namespace agmm {

/// The times of a tile of out, for pictures, in nanoseconds of the GPU's global timer: when the
/// wait for A began and ended (with its first columns), when the last columns were found to be
/// there, and when the last load was issued. `sm` is the multiprocessor that computed the tile.
struct TileTimes {
  uint64_t wait_begin_ns;
  uint64_t wait_end_ns;
  uint64_t found_ns;
  uint64_t loads_end_ns;
  uint32_t sm;
  uint32_t reserved;
};

/// The times of a tile of a matmul + reduce-scatter, by the same clock: when the first and the last
/// load were issued, when the sum was computed, and when the tile had left, or, if it is the rank's
/// own, when the other ranks' partial sums had been added.
struct ScatterTimes {
  uint64_t loads_begin_ns;
  uint64_t loads_end_ns;
  uint64_t computed_ns;
  uint64_t done_ns;
  uint32_t sm;
  uint32_t reserved;
};

}  // namespace agmm
