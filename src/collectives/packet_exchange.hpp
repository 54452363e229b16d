// Device side of collectives by packets: nothing is awaited between data and signal.
//
// Memory order. A packet is one access of 128 bits: who sees the flag has the data.
//
// What a small call takes: the launch, a load of the input (the turn is under way with it), the
// packets' way, a load that sees them, the store of the result, and some 300 instructions of one
// warp in between, which take as long as two of these. So hosts compute what kernels need not, rare
// cases are functions of their own, and nothing waits for the CTA behind the first packet: the turn
// passes on while the packets fly.
#pragma once

#include "collectives/exchange_device.hpp"

namespace agmm {

template <class Element_, ExchangeStep kStep, int kMost>
struct Packets : Exchange<Element_, Packet::kWords, kStep, kMost> {
  using Base = Exchange<Element_, Packet::kWords, kStep, kMost>;
  using Base::after, Base::args, Base::first_group, Base::group_stride, Base::is_there, Base::place;
  using Base::Base;
  using Base::slot;
  using typename Base::Group;

  CUTLASS_DEVICE Packet* packet(int distance, int64_t at) const {
    return reinterpret_cast<Packet*>(args.slots[distance] + at);
  }
  CUTLASS_DEVICE Packet packet_of(Group const& group) const {
    return {{group.words[0], group.words[1], group.words[2]}, args.tag};
  }
  static CUTLASS_DEVICE Group group_of(Packet const& packet) {
    return {{packet.data[0], packet.data[1], packet.data[2]}};
  }

  // What a thread sends of a group.
  static constexpr bool kOneForAll = is_gather(kStep) || kStep == ExchangeStep::Sum;
  static constexpr int kSent = kOneForAll ? 1 : kMost - 1;

  CUTLASS_DEVICE void load_sent(int32_t group, Group (&sent)[kSent]) const {
    if constexpr (kOneForAll) {
      sent[0] = Base::load(args.rank, group);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSent; ++i) {  // all are under way together
        if (i + 1 >= args.world_size) break;
        if (is_there(after(i + 1), group)) sent[i] = Base::load(after(i + 1), group);
      }
    }
  }

  /// Finds out the slot and sends: the first loads, that of the turn among them, are under way
  /// together.
  CUTLASS_DEVICE void send() {
    Group sent[kSent];
    int32_t g = first_group();
    if (g < args.groups) load_sent(g, sent);
    own_ = sent[0];
    slot = slot_of_launch(args);
    CUTLASS_PRAGMA_NO_UNROLL
    while (g < args.groups) {
      int64_t const at = place(0, args.rank, g, true);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kMost - 1; ++i) {
        if (i + 1 >= args.world_size) break;
        stress_delay(args.rank);
        if (!is_there(after(i + 1), g)) continue;
        store_packet(packet(i + 1, at), packet_of(sent[kOneForAll ? 0 : i]));
      }
      if constexpr (is_gather(kStep)) {
        if (!Base::is_in_place()) Base::store(args.rank, g, sent[0]);
      }
      g += group_stride();
      if (g < args.groups) load_sent(g, sent);
    }
  }

  /// Takes out the packets of a group. `coming`: from whom, a bit for each.
  CUTLASS_DEVICE void take(int step, int32_t group, uint32_t coming, Packet (&found)[kMost]) const {
    char* const places = args.slots[0] + place(step, 0, group, true);
    auto const packet_of = [&](int source) {
      return reinterpret_cast<Packet*>(places + int64_t(source) * args.stretch_bytes);
    };
    uint32_t pending = coming, since = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int source = 0; source < kMost; ++source) found[source].flag = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    do {
      // All are under way together.
      CUTLASS_PRAGMA_UNROLL
      for (int source = 0; source < kMost; ++source) {
        load_packet_if((pending >> source & 1u) != 0, found[source], packet_of(source));
      }
      CUTLASS_PRAGMA_UNROLL
      for (int source = 0; source < kMost; ++source) {
        if (found[source].flag == args.tag) pending &= ~(1u << source);
      }
      if (pending == 0) break;
      int missing = -1;
      uint32_t seen = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int source = 0; source < kMost; ++source) {
        if ((pending >> source & 1u) == 0 || seen != 0) continue;
        missing = source;  // rather one that called with something else
        seen = found[source].flag;
      }
      since = check_exchange_wait(args, slot, pending, seen, missing, since);
    } while (!kNoWait);
    CUTLASS_PRAGMA_UNROLL
    for (int source = 0; source < kMost; ++source) {
      if ((coming >> source & 1u) == 0) continue;
      if constexpr (kNoWait) {
        // Every packet is taken out once, with the fault too.
        while (load_packet(packet_of(source)).flag != args.tag)
          since = check_exchange_wait(args, slot, 1u << source, 0, source, since);
      }
      packet_of(source)->flag = 0;
    }
  }

  CUTLASS_DEVICE void sum() const {
    uint32_t const others = Base::others();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t g = first_group(); g < args.groups; g += group_stride()) {
      if (!is_there(args.rank, g)) break;
      Group own = own_;
      if (kStep != ExchangeStep::Sum || g != first_group()) own = Base::load(args.rank, g);
      Packet found[kMost];
      take(0, g, others, found);
      Group const result = Base::sum_of(
          [&](int source) { return source == args.rank ? own : group_of(found[source]); });
      if constexpr (kStep == ExchangeStep::SumAndShare) {
        int64_t const at = place(1, args.rank, g, true);
        CUTLASS_PRAGMA_UNROLL
        for (int distance = 1; distance < kMost; ++distance) {
          if (distance >= args.world_size) break;
          stress_delay(args.rank);
          store_packet(packet(distance, at), packet_of(result));
        }
      }
      Base::store(args.rank, g, result);
    }
  }

  CUTLASS_DEVICE void gather(int step) const {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t g = first_group(); g < args.groups; g += group_stride()) {
      uint32_t coming = Base::others();
      CUTLASS_PRAGMA_UNROLL
      for (int source = 0; source < kMost; ++source) {
        if (!is_there(source, g)) coming &= ~(1u << source);
      }
      Packet found[kMost];
      take(step, g, coming, found);
      CUTLASS_PRAGMA_UNROLL
      for (int source = 0; source < kMost; ++source) {
        if ((coming >> source & 1u) != 0) Base::store(source, g, group_of(found[source]));
      }
    }
  }

 protected:
  Group own_;  // this rank's first group, of a sum that all make
};

}  // namespace agmm
