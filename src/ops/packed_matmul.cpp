#include "agmm/packed_matmul.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "gemm/call_spec.hpp"
#include "gemm/packed_entry.hpp"
#include "ops/call_fields.hpp"
#include "ops/launching.hpp"
#include "order/streaming.hpp"

namespace agmm {

namespace {

void check(PackedMatmul const& call) {
  if (call.m < 1) refuse("a", "M=" + std::to_string(call.m), "at least 1");
  if (call.n < 1) refuse("b", "N=" + std::to_string(call.n), "at least 1");
  if (call.k < 1) refuse("a", "K=" + std::to_string(call.k), "at least 1");
  require_multiple("a", "K", call.k);
  require_multiple("b", "N", call.n);
  require_aligned("a", call.a);
  require_aligned("b", call.b);
  require_aligned("out", call.out);
  if (call.bias != nullptr) require_aligned("bias", call.bias);
  if (call.groups != 1 && call.groups != 4) {
    refuse("groups", std::to_string(call.groups), "1 or 4");
  }
  int32_t const most = min_of(kMaxStreamingCluster, ceil_div(call.k, kStreamedK));
  if (call.splits < 1 || call.splits > most) {
    refuse("splits", std::to_string(call.splits), "1 to " + std::to_string(most));
  }
}

}  // namespace

void packed_matmul(PackedMatmul const& given, void* stream) {
  check(given);
  int const which = (given.m > 32 ? 1 : 0) + (given.groups == 4 ? 2 : 0);
  KernelEntry const& entry = kPackedKernels[std::size_t(which)];
  DeviceFacts const& device = current_device();
  CallSpec call;
  AsyncInputArgs& mm = call.matmul;
  mm.problem = {given.m, given.n, given.k};
  mm.config.shape = entry.facts.shape;
  mm.config.splits = given.splits;
  mm.operands.a = given.a;
  mm.operands.b = given.b;
  mm.operands.bias = given.bias;
  mm.operands.out = given.out;
  mm.sm_count = min_of(given.sm_count == 0 ? device.sm_count : given.sm_count, device.sm_count);
  KernelVariant const& kernel = entry.lean;
  make_ready(kernel, device);
  static KeptParams<CallSpec> kept[std::size_t(4)];
  KernelParams const params = kept[which].find_or_build(call, [&] {
    KernelParams memory = allocate_params(kernel.params_bytes);
    if (char const* reason = kernel.prepare(call, memory.get())) {
      throw std::invalid_argument(std::string("agmm: packed matmul: ") + reason);
    }
    return memory;
  });
  check_cuda(static_cast<cudaError_t>(kernel.launch(params.get(), stream)), "kernel launch");
}

}  // namespace agmm
