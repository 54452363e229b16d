// Collectives by packets where not all ranks are linked, as in a hybrid cube mesh: one shot in two
// steps, of which no packet crosses any but a link.
//
// In the first step a rank sends to its neighbours. One that has links to both passes on what a
// rank sends to another, packet by packet, as it comes: into the same place of the second step. So
// every rank gets everything, once, and sums it in the order of the ranks: the same bits as without
// relays.
//
// That ends as other exchanges do: what is passed on is a part of the first step, which awaits
// nothing; and a launch ends when something has come from every rank, if over another.
#include "collectives/packet_exchange.hpp"

namespace agmm {

namespace {

template <class Element_, ExchangeStep kStep, int kMost>
struct RelayedPackets : Packets<Element_, kStep, kMost> {
  using Base = Packets<Element_, kStep, kMost>;
  using Base::args, Base::packet, Base::packet_of, Base::group_of, Base::place, Base::slot;
  using typename Base::Group;

  RelayArgs const& relays;

  CUTLASS_DEVICE RelayedPackets(ExchangeArgs const& args_, RelayArgs const& relays_)
      : Base(args_), relays(relays_) {}

  /// Sends to the ranks at these distances, a bit for each.
  CUTLASS_DEVICE void send_to(uint32_t distances, int64_t at, Packet const& sent) const {
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < kMost; ++distance) {
      if ((distances >> distance & 1u) == 0) continue;
      stress_delay(args.rank);
      store_packet(packet(distance, at), sent);
    }
  }

  CUTLASS_DEVICE void send() {
    slot = slot_of_launch(args);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t g = Base::first_group(); g < args.groups; g += Base::group_stride()) {
      Group const own = Base::load(args.rank, g);
      send_to(relays.near_distances, place(0, args.rank, g, true), packet_of(own));
    }
  }

  CUTLASS_DEVICE void run() const {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t g = Base::first_group(); g < args.groups; g += Base::group_stride()) {
      Group const own = Base::load(args.rank, g);
      Packet near[kMost];
      Base::take(0, g, relays.near, near);
      CUTLASS_PRAGMA_UNROLL
      for (int source = 0; source < kMost; ++source) {
        send_to(relays.passed_on[source], place(1, source, g, true), near[source]);
      }
      Packet far[kMost];
      Base::take(1, g, relays.far, far);
      auto const part = [&](int source) {
        if (source == args.rank) return own;
        return group_of((relays.near >> source & 1u) != 0 ? near[source] : far[source]);
      };
      if constexpr (kStep == ExchangeStep::Gather) {
        CUTLASS_PRAGMA_UNROLL
        for (int source = 0; source < kMost; ++source) {
          if (source >= args.world_size) break;
          if (source != args.rank || !Base::is_in_place()) Base::store(source, g, part(source));
        }
      } else {
        Base::store(args.rank, g, Base::sum_of(part));
      }
    }
  }
};

template <class Element, ExchangeStep kStep, int kMost>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    relayed_kernel(__grid_constant__ ExchangeArgs const args,
                   __grid_constant__ RelayArgs const relays) {
  RelayedPackets<Element, kStep, kMost> exchange(args, relays);
  exchange.send();
  pass_turn(args, exchange.slot);
  stress_delay(args.rank);
  exchange.run();
}

}  // namespace

RelayedKernel relayed_kernel_of(CollectiveElement element, ExchangeStep step) {
  constexpr int kMost = kMaxExchangeRanks;
  if (step == ExchangeStep::Gather) return relayed_kernel<uint8_t, ExchangeStep::Gather, kMost>;
  switch (element) {
    case CollectiveElement::BFloat16:
      return relayed_kernel<cutlass::bfloat16_t, ExchangeStep::Sum, kMost>;
    case CollectiveElement::Float16:
      return relayed_kernel<cutlass::half_t, ExchangeStep::Sum, kMost>;
    default:
      return relayed_kernel<float, ExchangeStep::Sum, kMost>;
  }
}

}  // namespace agmm
