// What becomes of the tiles of a streaming kernel: they are stored, or summed over the ranks by
// packets, so that a matmul of few rows and its all-reduce are one kernel.
//
// In one shot a thread that has added up the splits of 6 columns of a row rounds them and sends
// them, as one packet of 12 bytes and its flag, to every other rank; what this rank has computed it
// leaves in its own memory, in the stretch of its own rank, to which nobody else writes. When a CTA
// has sent all of its tiles, each of its threads goes through the same packets again, takes out
// those of the other ranks, adds up in the order of the ranks in float32, adds the bias and the
// residual and rounds once. In two shots each packet has an owner among the ranks, by its number:
// it goes to the owner alone, who sums it and sends the rounded sum to all. A reduce-scatter is the
// first of these shots, where neighbouring rows have an owner. What is added up are the same
// rounded numbers in one order: all ranks get the same bits, in every call and either way.
//
// Where rows are normed too, CTAs take out whole rows in place of their own packets
// (streamed_norm.hpp has the argument for that).
//
// Memory order. A packet is one access of 128 bits, so who sees the flag has the data
// (packet_exchange.hpp). What a thread leaves in its own memory is read by that thread alone, but
// for a norm: then it is a packet like those of other ranks.
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
// nothing out and may end early, as does one whose rows other ranks own, but the launch ends with
// those that do.
//
// Programmatic launch. The threads that send wait for the end of the kernel ahead (multiply())
// before they read the turn, which that one may have written, and so before they write to a peer.
// This kernel never lets the next one start early: it waits for peers.
#pragma once

#include <cstdint>

#include "collectives/packet_exchange.hpp"
#include "gemm/sm90/streamed_norm.hpp"
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
    Element const* residual = nullptr;  // as long as out, of a sum for all the same on all ranks
    bool is_shared = false;             // two shots
    bool is_scattered = false;          // each rank gets its rows of the sum alone
    int32_t owned_rows = 0;  // that a rank sums; 0 where packets have owners by number, or none
    StreamedNormArgs norm{};

    CUTLASS_HOST_DEVICE bool has_norm() const { return norm.weight != nullptr; }
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
    static constexpr int kOfWord = kElements / Packet::kWords;  // elements
    static_assert(kAlignment % kOfWord == 0 && kStreamedColumns % kOfWord == 0);

    Params const& params;
    uint32_t launch = 0;     // thread 0's, of a norm: the launch's number
    bool may_claim = false;  // thread 0's, of a norm: it has seen that all CTAs have started

    CUTLASS_DEVICE explicit Of(Params const& params_)
        : Base(params_.sink.exchange), params(params_) {
      if (params.sink.has_norm() && threadIdx.x == 0) {
        launch = NormedRows<Of>::start(params.sink.norm);
      }
      slot = slot_of_launch(args);
      named_barrier_sync<NamedBarrier::kTurnSeen, kThreads>();
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = int(blockIdx.x + threadIdx.x * gridDim.x); i < kMaxExchangeCtas;
           i += kThreads * int(gridDim.x)) {
        args.turns[i] = uint32_t(1 - slot);
      }
    }

    /// Looks early whether all CTAs have started, while sums of the CTA's cluster are on their way.
    CUTLASS_DEVICE void look() {
      if (params.sink.has_norm() && threadIdx.x == 0) {
        may_claim = NormedRows<Of>::have_all_started(params.sink.norm, launch);
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

    CUTLASS_DEVICE bool is_shared() const { return params.sink.is_shared; }
    CUTLASS_DEVICE bool has_owners() const { return is_shared() || params.sink.is_scattered; }

    // Where neighbouring rows have an owner, and in one shot, a row's packets lie together.
    CUTLASS_DEVICE int owner_of_row(int32_t row) const {
      return params.sink.owned_rows != 0 ? row / params.sink.owned_rows : -1;
    }
    CUTLASS_DEVICE bool owns_row(int32_t row) const {
      return !has_owners() || owner_of_row(row) == args.rank;
    }
    CUTLASS_DEVICE int32_t packet_of_row(int32_t row, int32_t group) const {
      int32_t const units = ceil_div(params.weights[0].n, kStreamedColumns);
      int32_t const owned = params.sink.owned_rows;
      return (owned != 0 ? row % owned : row) * units * kUnitPackets + group;
    }

    /// The rank that sums a packet, for itself or for all; none in one shot, where every rank does.
    CUTLASS_DEVICE int owner(Part const& part) const {
      if (!has_owners()) return -1;
      return params.sink.owned_rows != 0 ? owner_of_row(part.row) : part.number % args.world_size;
    }
    CUTLASS_DEVICE bool is_own(Part const& part) const {
      return !has_owners() || owner(part) == args.rank;
    }
    /// The number that a packet has in a stretch.
    CUTLASS_DEVICE int32_t in_stretch(Part const& part) const {
      if (!has_owners()) return part.number;
      if (params.sink.owned_rows == 0) return part.number / args.world_size;
      int32_t const units = ceil_div(params.weights[0].n, kStreamedColumns);
      return part.number - owner(part) * params.sink.owned_rows * units * kUnitPackets;
    }
    /// Where the packet lies that this rank sends in a step.
    CUTLASS_DEVICE int64_t place_of(int step, Part const& part) const {
      return Base::place(step, args.rank, in_stretch(part), true);
    }

    CUTLASS_DEVICE void send_to_all(int64_t at, Group const& group) const {
      CUTLASS_PRAGMA_NO_UNROLL  // it is code that a call fetches anew
          for (int distance = 1; distance < args.world_size; ++distance) {
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
        if (params.sink.has_norm()) {  // another CTA may take it
          store_packet(packet(0, at), packet_of(group));
        } else {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < Packet::kWords; ++i) packet(0, at)->data[i] = group.words[i];
        }
        if (!has_owners()) send_to_all(at, group);
      });
    }

    // A packet's columns are whole words, since N is a multiple of 8.

    CUTLASS_DEVICE static Group load(Element const* from, int32_t count) {
      Group found{};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Packet::kWords; ++i) {
        if (i * kOfWord < count) found.words[i] = reinterpret_cast<uint32_t const*>(from)[i];
      }
      return found;
    }
    CUTLASS_DEVICE static void store(Element* to, int32_t count, Group const& group) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Packet::kWords; ++i) {
        if (i * kOfWord < count) reinterpret_cast<uint32_t*>(to)[i] = group.words[i];
      }
    }
    /// Stores some columns of a row of the result.
    CUTLASS_DEVICE void store_at(int32_t row, int32_t column, int32_t count,
                                 Group const& group) const {
      auto const& weight = params.weights[0];
      store(weight.out + int64_t(row) * weight.n + column, count, group);
    }
    CUTLASS_DEVICE void store(Part const& part, Group const& group) const {
      store_at(row_of_out(part), part.column, part.count, group);
    }
    CUTLASS_DEVICE int32_t row_of_out(Part const& part) const {
      return params.sink.is_scattered ? part.row % params.sink.owned_rows : part.row;
    }

    /// The result of what all ranks have sent of a packet.
    CUTLASS_DEVICE Group summed(Part const& part) const {
      Element const* const bias = params.weights[0].epilogue.bias;
      Element const* const residual = params.sink.residual;
      // These are under way together, and with the packets.
      Group const own = group_of(*packet(0, place_of(0, part)));
      Group added_bias{}, added{};
      if (bias != nullptr) added_bias = load(bias + part.column, part.count);
      if (residual != nullptr) {
        int64_t const at = int64_t(row_of_out(part)) * params.weights[0].n + part.column;
        added = load(residual + at, part.count);
      }
      Packet found[kMaxExchangeRanks];
      Base::take(0, in_stretch(part), Base::others(), found);
      Sum sum;
      sum.clear();
      CUTLASS_PRAGMA_UNROLL
      for (int source = 0; source < kMaxExchangeRanks; ++source) {
        if (source >= args.world_size) break;
        Base::add(sum, source == args.rank ? own : group_of(found[source]), source == 0);
      }
      if (args.scale != 1.0f) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kElements; ++i) sum[i] *= args.scale;
      }
      if (bias != nullptr) Base::add(sum, added_bias, false);
      if (residual != nullptr) Base::add(sum, added, false);
      return Base::rounded(sum);
    }

    /// The result that a packet's owner has sent.
    CUTLASS_DEVICE Group shared_result(Part const& part) const {
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

    /// Takes out what all ranks have sent of this CTA's tiles, and stores the sums; or norms rows.
    template <class Place>
    CUTLASS_DEVICE void take(Shared& shared, Place const& where) const {
      stress_delay(args.rank);
      if (params.sink.has_norm()) return NormedRows<Of>(*this, shared).run(launch, may_claim);
      for_each_of_all(where, [&](Part const& part) {
        if (!is_own(part)) return;
        Group const group = summed(part);
        if (is_shared()) send_to_all(place_of(1, part), group);
        store(part, group);
      });
      if (!is_shared()) return;
      for_each_of_all(where, [&](Part const& part) {
        if (!is_own(part)) store(part, shared_result(part));
      });
    }
  };
};

}  // namespace agmm
