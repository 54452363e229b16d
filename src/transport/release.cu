#include "transport/release.hpp"

#include "sync/device_release.hpp"

namespace agmm {

namespace {

constexpr int kWarp = 32;

__global__ void __launch_bounds__(kWarp) release_kernel(Release const release) {
  finish(release, 1, {});  // the only warp is the last
}

}  // namespace

cudaError_t prepare_release() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, release_kernel);
}

cudaError_t launch_release(Release const& release, cudaStream_t stream) {
  release_kernel<<<1, kWarp, 0, stream>>>(release);
  return cudaGetLastError();
}

}  // namespace agmm
