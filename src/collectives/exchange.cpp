#include "collectives/exchange.hpp"

namespace agmm {

namespace {

ExchangeKernel kernel_of(CollectiveElement element, ExchangeStep step, Carrier carrier,
                         int world_size) {
  return carrier == Carrier::Packets ? packets_kernel_of(element, step, world_size)
                                     : blocks_kernel_of(element, step, world_size);
}

template <class Kernel>
cudaError_t load(Kernel kernel) {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<void const*>(kernel));
}

template <class Kernel, class... Args>
cudaError_t launch(Kernel kernel, ExchangeGrid const& grid, std::size_t shared_bytes,
                   cudaStream_t stream, Args... args) {
  void* params[] = {&args...};
  return cudaLaunchKernel(reinterpret_cast<void const*>(kernel), dim3(unsigned(grid.ctas)),
                          dim3(unsigned(grid.threads)), params, shared_bytes, stream);
}

}  // namespace

cudaError_t prepare_exchanges(int world_size) {
  for (CollectiveElement const element :
       {CollectiveElement::BFloat16, CollectiveElement::Float16, CollectiveElement::Float32}) {
    for (ExchangeStep const step : {ExchangeStep::Gather, ExchangeStep::Sum, ExchangeStep::Scatter,
                                    ExchangeStep::SumAndShare, ExchangeStep::GatherTwo}) {
      for (Carrier const carrier : {Carrier::Packets, Carrier::Blocks}) {
        cudaError_t const error = load(kernel_of(element, step, carrier, world_size));
        if (error != cudaSuccess) return error;
      }
    }
    for (ExchangeStep const step : {ExchangeStep::Sum, ExchangeStep::SumAndShare}) {
      cudaError_t const error = load(norm_kernel_of(element, step, world_size));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t prepare_relayed() {
  for (CollectiveElement const element :
       {CollectiveElement::BFloat16, CollectiveElement::Float16, CollectiveElement::Float32}) {
    for (ExchangeStep const step : {ExchangeStep::Gather, ExchangeStep::Sum}) {
      cudaError_t const error = load(relayed_kernel_of(element, step));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_exchange(ExchangeArgs const& args, CollectiveElement element, ExchangeStep step,
                            Carrier carrier, ExchangeGrid const& grid, cudaStream_t stream) {
  return launch(kernel_of(element, step, carrier, args.world_size), grid, 0, stream, args);
}

cudaError_t launch_norm(ExchangeArgs const& args, NormArgs const& norm, CollectiveElement element,
                        ExchangeStep step, ExchangeGrid const& grid, cudaStream_t stream) {
  std::size_t const shared_bytes = std::size_t(norm.row_groups) * kPacketDataBytes;
  return launch(norm_kernel_of(element, step, args.world_size), grid, shared_bytes, stream, args,
                norm);
}

cudaError_t launch_relayed(ExchangeArgs const& args, RelayArgs const& relays,
                           CollectiveElement element, ExchangeStep step, ExchangeGrid const& grid,
                           cudaStream_t stream) {
  return launch(relayed_kernel_of(element, step), grid, 0, stream, args, relays);
}

}  // namespace agmm
