// Collectives by packets: one shot, or two.
#include "collectives/packet_exchange.hpp"

namespace agmm {

namespace {

template <class Element, ExchangeStep kStep, int kMost>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    packets_kernel(__grid_constant__ ExchangeArgs const args) {
  Packets<Element, kStep, kMost> exchange(args);
  if constexpr (is_gather(kStep)) {
    if (args.lets_next_start) let_next_kernel_start();
  }
  exchange.send();
  pass_turn(args, exchange.slot);
  stress_delay(args.rank);
  if constexpr (is_gather(kStep)) {
    exchange.gather(0);
  } else {
    exchange.sum();
  }
  if constexpr (kStep == ExchangeStep::SumAndShare) exchange.gather(1);
}

template <class Element, ExchangeStep kStep, int kMost>
struct PacketsKernel {
  static constexpr ExchangeKernel kKernel = packets_kernel<Element, kStep, kMost>;
};

}  // namespace

ExchangeKernel packets_kernel_of(CollectiveElement element, ExchangeStep step, int world_size) {
  return exchange_kernel_of<PacketsKernel>(element, step, world_size);
}

}  // namespace agmm
