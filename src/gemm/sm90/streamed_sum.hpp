// What becomes of the tiles of a streaming kernel: they are stored, or summed over the ranks by
// packets, so that a matmul of few rows and its all-reduce are one kernel.
//
// In one shot a thread that has added up the splits of 6 columns of a row rounds them and sends
// them, as one packet of 12 bytes and its flag, to every other rank; what this rank has computed it
// leaves in its own memory, in the stretch of its own rank, to which nobody else writes. When a CTA
// has sent all of its tiles, each of its threads goes through the same packets again, takes out
// those of the other ranks, adds up in the order of the ranks in float32, adds the bias and the
// residual and rounds once. In two shots each packet has an owner among the ranks, by its number:
// it goes to the owner alone, who sums it and sends the rounded sum to all. What is added up are
// the same rounded numbers in one order: all ranks get the same bits, in every call and either way.
//
// Memory order. A packet is one access of 128 bits, so who sees the flag has the data
// (packet_exchange.hpp). What a thread leaves in its own memory is read by that thread alone.
//
// Who waits for whom, and why it ends: as in collectives/exchange.hpp, of whose workspace this is a
// launch. All ranks have the same kernel, splits and number of clusters (they are in the tag), so
// CTA i of every rank has the same packets. It waits for those of CTA i of the other ranks, behind
// all of its own sends; and while it multiplies, for nothing but the CTAs of its own cluster, which
// run with it. So of the clusters that are not done the lowest runs on every rank, and nothing
// keeps it from ending. In two shots it awaits first steps alone until it has sent all of its
// second one, and then second steps. No wait goes past its limit (check_exchange_wait).
//
// Why two slots are enough, and flags are reset: as there. The slot is that of the workspace's
// `turns`. A CTA that owns no row, as there are where K has more splits than out has rows, takes
// nothing out and may end early, but the launch ends with those that do.
//
// Programmatic launch. The threads that send wait for the end of the kernel ahead (multiply())
// before they read the turn, which that one may have written, and so before they write to a peer.
// This kernel never lets the next one start early: it waits for peers.
#pragma once

#include <cstdint>

#include "collectives/packet_exchange.hpp"
#include "order/chunking.hpp"
#include "order/streaming.hpp"
#include "sync/named_barrier.hpp"

namespace agmm {

/// Tiles are stored as they are, with the epilogue behind them.
struct StoredTiles {
  static constexpr bool kSends = false;
  struct Args {};

  template <class Kernel>
  struct Of {
    CUTLASS_DEVICE explicit Of(typename Kernel::Params const&) {}
  };
};

/// Tiles are summed over the ranks. The bias of the epilogue is added to the sum.
template <class Element>
struct SummedTiles {
  static constexpr bool kSends = true;
  struct Args {
    ExchangeArgs exchange{};
    Element const* residual = nullptr;  // [m, n], the same on all ranks; or null
    bool is_shared = false;             // two shots
  };

  template <class Kernel>
  struct Of : Packets<Element, ExchangeStep::Sum, kMaxExchangeRanks> {
    using Base = Packets<Element, ExchangeStep::Sum, kMaxExchangeRanks>;
    using Base::args, Base::kElements, Base::packet, Base::packet_of, Base::group_of, Base::slot;
    using typename Base::Group;
    using typename Base::Sum;
    using Params = typename Kernel::Params;
    using Shared = typename Kernel::Shared;

    static constexpr int kThreads = Kernel::kMultiplyingWarps * cutlass::NumThreadsPerWarp;
    static constexpr int kUnits = Kernel::kTileN / kStreamedColumns;
    static constexpr int kPackets = kUnits * kUnitPackets;  // of a row of a tile
    static_assert(kUnitPackets == ceil_div(kStreamedColumns, kElements));

    Params const& params;

    CUTLASS_DEVICE explicit Of(Params const& params_)
        : Base(params_.sink.exchange), params(params_) {
      slot = slot_of_launch(args);
      named_barrier_sync<NamedBarrier::kTurnSeen, kThreads>();
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = int(blockIdx.x + threadIdx.x * gridDim.x); i < kMaxExchangeCtas;
           i += kThreads * int(gridDim.x)) {
        args.turns[i] = uint32_t(1 - slot);
      }
    }

    /// What a packet carries: some columns of a row.
    struct Part {
      int32_t of_owner;  // the row's number among this CTA's
      int32_t in_tile;   // the first column's
      int32_t row;
      int32_t column;
      int32_t count;
      int32_t number;  // of the packet

      CUTLASS_DEVICE int64_t at(Params const& params) const {
        return int64_t(row) * params.weights[0].n + column;
      }
    };

    /// Calls `visit(part)` for the packets of this thread of one tile, the same ones each time.
    template <class Place, class Tile, class Visit>
    CUTLASS_DEVICE void for_each(Place const& where, Tile const& tile, Visit const& visit) const {
      int32_t const splits = params.splits.divisor;
      int32_t const rows = params.splits.divide(tile.rows.size() + splits - 1 - where.split);
      int32_t const units = ceil_div(params.weights[0].n, kStreamedColumns);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t i = int32_t(threadIdx.x); i < rows * kPackets; i += kThreads) {
        int32_t const unit = i % kPackets / kUnitPackets;
        int32_t const of_unit = i % kUnitPackets;
        int32_t const in_unit = of_unit * kElements;
        Part part;
        part.of_owner = i / kPackets;
        part.in_tile = unit * kStreamedColumns + in_unit;
        part.column = tile.column + part.in_tile;
        if (part.column >= params.weights[0].n) continue;
        part.count = min_of(min_of(kElements, kStreamedColumns - in_unit),
                            params.weights[0].n - part.column);
        part.row = tile.rows.begin + part.of_owner * splits + where.split;
        part.number =
            (part.row * units + tile.column / kStreamedColumns + unit) * kUnitPackets + of_unit;
        visit(part);
      }
    }

    /// The rank that sums a packet for all; none in one shot, where every rank sums it.
    CUTLASS_DEVICE int owner(Part const& part) const {
      return params.sink.is_shared ? part.number % args.world_size : -1;
    }
    CUTLASS_DEVICE bool is_own(Part const& part) const {
      return !params.sink.is_shared || owner(part) == args.rank;
    }
    /// The number that a packet has in a stretch.
    CUTLASS_DEVICE int32_t in_stretch(Part const& part) const {
      return params.sink.is_shared ? part.number / args.world_size : part.number;
    }
    /// Where the packet lies that this rank sends in a step.
    CUTLASS_DEVICE int64_t place_of(int step, Part const& part) const {
      return Base::place(step, args.rank, in_stretch(part), true);
    }

    CUTLASS_DEVICE void send_to_all(int64_t at, Group const& group) const {
      CUTLASS_PRAGMA_UNROLL
      for (int distance = 1; distance < kMaxExchangeRanks; ++distance) {
        if (distance >= args.world_size) break;
        stress_delay(args.rank);
        store_packet(packet(distance, at), packet_of(group));
      }
    }

    /// Adds up the splits of this CTA's share of a tile, and sends it.
    template <class Place, class Tile>
    CUTLASS_DEVICE void send(Shared const& shared, Place const& where, Tile const& tile) const {
      for_each(where, tile, [&](Part const& part) {
        Sum sum;
        sum.clear();
        CUTLASS_PRAGMA_NO_UNROLL
        for (int32_t split = 0; split < params.splits.divisor; ++split) {
          float const* const from =
              shared.sums + Kernel::sums_at(params, split, part.of_owner) + part.in_tile;
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kElements; ++j) {
            if (j < part.count) sum[j] = split == 0 ? from[j] : sum[j] + from[j];
          }
        }
        Group const group = Base::rounded(sum);
        int64_t const at = place_of(0, part);
        if (!is_own(part)) {
          int const ahead = owner(part) - args.rank;
          stress_delay(args.rank);
          store_packet(packet(ahead < 0 ? ahead + args.world_size : ahead, at), packet_of(group));
          return;
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Packet::kWords; ++i) packet(0, at)->data[i] = group.words[i];
        if (!params.sink.is_shared) send_to_all(at, group);
      });
    }

    CUTLASS_DEVICE Group load(Element const* from, int32_t count) const {
      auto const* const bytes = reinterpret_cast<char const*>(from);
      return count == kElements ? Base::load_whole(bytes) : Base::load_elements(bytes, count);
    }

    CUTLASS_DEVICE void store(Part const& part, Group const& group) const {
      auto* const to = reinterpret_cast<char*>(params.weights[0].out + part.at(params));
      if (part.count == kElements) {
        Base::store_whole(to, group);
      } else {
        Base::store_elements(to, part.count, group);
      }
    }

    /// The result of what all ranks have sent of a packet.
    CUTLASS_DEVICE Group summed(Part const& part) const {
      Packet found[kMaxExchangeRanks];
      Base::take(0, in_stretch(part), Base::others(), found);
      Group const own = group_of(*packet(0, place_of(0, part)));
      Sum sum;
      sum.clear();
      CUTLASS_PRAGMA_UNROLL
      for (int source = 0; source < kMaxExchangeRanks; ++source) {
        if (source >= args.world_size) break;
        Base::add(sum, source == args.rank ? own : group_of(found[source]), source == 0);
      }
      if (params.weights[0].epilogue.bias != nullptr) {
        Base::add(sum, load(params.weights[0].epilogue.bias + part.column, part.count), false);
      }
      if (params.sink.residual != nullptr) {
        Base::add(sum, load(params.sink.residual + part.at(params), part.count), false);
      }
      return Base::rounded(sum);
    }

    /// The result that a packet's owner has sent.
    CUTLASS_DEVICE Group shared(Part const& part) const {
      Packet found[kMaxExchangeRanks];
      Base::take(1, in_stretch(part), 1u << owner(part), found);
      Group group{};
      CUTLASS_PRAGMA_UNROLL
      for (int source = 0; source < kMaxExchangeRanks; ++source) {
        if (source == owner(part)) group = group_of(found[source]);
      }
      return group;
    }

    template <class Place, class Visit>
    CUTLASS_DEVICE void for_each_of_all(Place const& where, Visit const& visit) const {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t block = where.cluster; block < params.blocks; block += params.clusters) {
        for_each(where, typename Kernel::Tile(params, where, block), visit);
      }
    }

    /// Takes out what all ranks have sent of this CTA's tiles, and stores the sums.
    template <class Place>
    CUTLASS_DEVICE void take(Place const& where) const {
      stress_delay(args.rank);
      for_each_of_all(where, [&](Part const& part) {
        if (!is_own(part)) return;
        Group const group = summed(part);
        if (params.sink.is_shared) send_to_all(place_of(1, part), group);
        store(part, group);
      });
      if (!params.sink.is_shared) return;
      for_each_of_all(where, [&](Part const& part) {
        if (!is_own(part)) store(part, shared(part));
      });
    }
  };
};

}  // namespace agmm
