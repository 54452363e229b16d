// The end of a call whose consumer cannot give the buffers back: a kernel behind it.
#pragma once

#include <cuda_runtime_api.h>

#include "sync/release.hpp"

namespace agmm {

/// Loads the kernel, which a capture could not.
cudaError_t prepare_release();

/// Enqueues what `release` says, to be done once all that the stream has is over.
cudaError_t launch_release(Release const& release, cudaStream_t stream);

}  // namespace agmm
