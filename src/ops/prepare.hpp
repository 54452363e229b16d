// The launcher, for the ops.
#pragma once

#include "agmm/async_input_mm.hpp"
#include "gemm/call_spec.hpp"

namespace agmm {

/// Does what prepare_async_input_mm() does, for all that an op says of a launch.
PreparedMatmul prepare(CallSpec const& call);

/// The launch of a matmul alone, which starts as early as the environment allows.
CallSpec call_of(AsyncInputArgs const& args);

}  // namespace agmm
