// The launcher, for the ops.
#pragma once

#include "agmm/async_input_mm.hpp"
#include "gemm/call_spec.hpp"

namespace agmm {

/// As prepare_async_input_mm().
PreparedMatmul prepare(CallSpec const& call);

}  // namespace agmm
