// The one description of a launch: what a caller of the public API says of a matmul, and what an op
// adds to it. Its parts pass through whole, from where they are made to the kernel's parameters.
#pragma once

#include "agmm/async_input_mm.hpp"
#include "collectives/exchange.hpp"
#include "sync/release.hpp"
#include "sync/wait_limit.hpp"
#include "transport/sm_push.hpp"

namespace agmm {

/// The RMS norm of the rows that a streaming kernel has summed.
struct StreamedNormArgs {
  void const* weight = nullptr;  // [n]; null: rows are not normed
  void* normed = nullptr;        // [m, n]; of fp8 where there are scales
  float eps = 0;
  float* scales = nullptr;  // [m, scales_of_row], each of so many columns; null: none
  int32_t scale_columns = 0;
  int32_t scales_of_row = 0;
  uint32_t* counters = nullptr;  // CollectiveLayout::counters
};

/// The sum over the ranks that a streaming kernel makes of its product.
struct StreamedExchange {
  ExchangeArgs args{};             // of one rank: there is none
  void const* residual = nullptr;  // that is added to the sum, or null
  bool is_shared = false;          // a rank's share of the sum is summed by it, in two shots
  bool is_scattered = false;       // and stays there, in one
  int32_t owned_rows = 0;          // of a rank's share; 0: it has packets by number
  StreamedNormArgs norm{};

  bool is_there() const { return args.world_size > 1; }
};

struct CallSpec {
  AsyncInputArgs matmul{};
  Release release{};  // what the kernel does when it has read A
  SmPushArgs push{};  // what its spare warps push; a null shard: nothing
  StreamedExchange exchange{};
  ReportPlace report_place{};  // filled in by the launcher
  // Whether the kernel may be set up while the one ahead of it in the stream still runs, where that
  // is a kernel. It may for matmuls for which no other kernel on this GPU has to make room.
  bool starts_early = false;
  // Whether a streaming kernel that starts early may load B before the kernel ahead has ended: the
  // caller promises that none which may still run writes it.
  bool weight_is_ahead = false;
  // Whether the kernel ahead is the op's own gather of A by packets, which starts when all kernels
  // before it have ended. Then both of the above hold, whatever the caller promises; and the next
  // kernel is not let start, which would take places while a peer is awaited.
  bool is_behind_gather = false;
};

}  // namespace agmm
