// The residual and the RMS norm of rows that a streaming kernel has summed over the ranks.
//
// A norm wants a whole row, of which each CTA has some columns. So with a norm no CTA takes the
// packets of its own tiles: each rank's products go to the ranks that sum them and to this one's
// own memory as packets, and a CTA that has sent all of its tiles claims rows, in ascending order.
// It takes a row's packets of all ranks, adds them up in the order of the ranks, adds bias and
// residual, rounds once, and norms what it has. In two shots a rank sums `owned_rows` neighbouring
// rows and sends the rounded sums to the others, which norm them too.
//
// Who waits for whom, and why it ends, however few CTAs run at once. A CTA claims a row only if it
// has seen that all CTAs of its launch have started; else it ends. A CTA that has started sends
// all that it computes and waits meanwhile for nothing but the CTAs of its own cluster. So those
// that wait take nobody's place in their own launch, all CTAs of a launch that has begun send, and
// all first packets come. The CTA that starts last sees that all have started, so on every rank
// somebody claims until no row is left. In two shots take the lowest row that is not normed
// everywhere: the rows before it are done, so on every rank a CTA has claimed it or will; on its
// owner that CTA waits for first packets alone, and then sends what the others wait for. No wait
// goes past its limit (check_exchange_wait).
//
// Bits. The length of a row alone decides which thread squares what, and the squares are added in
// one order: all ranks get the same bits in every call, in one shot or two, whoever claims a row.
//
// Counters. `started` has the CTAs of a launch in its low half, and launches in its high half: CTA
// 0 adds what the others leave to 2^16, so it carries when all have started and is then 0 again in
// its low half. A launch's number is what its CTAs find in the high half when they add. Claims are
// counted by one of two words, by the number's parity; CTA 0 makes the other one 0 for the next
// launch, which begins when this one has ended. Nothing is read through these counters, so they
// order nothing: the data comes with its flags.
//
// What is in the ring's stages has been multiplied when the sums of the last tile have come
// (sums_full), so threads keep a row and the norm's weight there, each what it alone reads.
#pragma once

#include <cstdint>

#include "collectives/row_norm.hpp"
#include "cutlass/numeric_conversion.h"
#include "gemm/call_spec.hpp"
#include "gemm/fp8_scale.cuh"
#include "order/streaming.hpp"
#include "sync/device_wait.hpp"
#include "sync/named_barrier.hpp"
#include "testing/fault.hpp"

namespace agmm {

/// Norms rows; Tiles_ is the SummedTiles::Of of a kernel.
template <class Tiles_>
struct NormedRows {
  using Tiles = Tiles_;
  using Shared = typename Tiles::Shared;
  using Group = typename Tiles::Group;
  using Sum = typename Tiles::Sum;
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kElements = Tiles::kElements;
  static constexpr int kWarps = kThreads / cutlass::NumThreadsPerWarp;
  /// A thread has so many packets of two ranks under way together. A row of 8192 columns is 11 for
  /// each thread.
  static constexpr int kBatch = 6;
  static constexpr int kSources = 2;

  Tiles const& tiles;
  Shared& shared;
  StreamedNormArgs const& norm;
  int32_t const groups;  // of a row

  CUTLASS_DEVICE NormedRows(Tiles const& tiles_, Shared& shared_)
      : tiles(tiles_),
        shared(shared_),
        norm(tiles_.params.sink.norm),
        groups(ceil_div(tiles_.params.weights[0].n, kStreamedColumns) * kUnitPackets) {}

  /// Counts this CTA and returns the launch's number. One thread calls it.
  CUTLASS_DEVICE static uint32_t start(StreamedNormArgs const& norm) {
    bool const is_first = blockIdx.x == 0;
    uint32_t const adds = is_first ? (1u << kLogLaunch) - (gridDim.x - 1) : 1u;
    uint32_t const number = add_relaxed_gpu(norm.counters, adds) >> kLogLaunch;
    if (is_first) norm.counters[1 + (number + 1) % 2] = 0;
    return number;
  }
  /// Whether all CTAs of the launch with this number have started.
  CUTLASS_DEVICE static bool have_all_started(StreamedNormArgs const& norm, uint32_t number) {
    return load_relaxed_gpu(norm.counters) >> kLogLaunch != number;
  }
  static constexpr int kLogLaunch = 16;

  CUTLASS_DEVICE void run(uint32_t number, bool may_claim) const {
    int32_t const rows = tiles.params.m;
    for (;;) {
      if (threadIdx.x == 0) {
        shared.claimed =
            may_claim ? int32_t(add_relaxed_gpu(norm.counters + 1 + number % 2, 1)) : rows;
      }
      named_barrier_sync<NamedBarrier::kTurnSeen, kThreads>();
      int32_t const row = shared.claimed;
      if (row >= rows) return;
      clear_amax();
      float const squares = sum_of_threads(reduce_row(row));
      norm_row(row, norm_scale(squares, tiles.params.weights[0].n, norm.eps));
    }
  }

 private:
  struct Part {
    int32_t column;
    int32_t count;  // none beyond the row
  };
  CUTLASS_DEVICE Part part(int32_t group) const {
    int32_t const in_unit = group % kUnitPackets * kElements;
    int32_t const column = group / kUnitPackets * kStreamedColumns + in_unit;
    int32_t const left = group < groups ? tiles.params.weights[0].n - column : 0;
    return {column, max_of(0, min_of(min_of(kElements, kStreamedColumns - in_unit), left))};
  }

  CUTLASS_DEVICE uint32_t* kept(int32_t group) const {
    return reinterpret_cast<uint32_t*>(shared.weight) + group * Packet::kWords;
  }
  CUTLASS_DEVICE uint32_t* kept_weight(int32_t group) const { return kept(groups + group); }
  CUTLASS_DEVICE static void keep(uint32_t* to, Group const& group) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Packet::kWords; ++i) to[i] = group.words[i];
  }
  CUTLASS_DEVICE static Sum floats_of(uint32_t const* from) {
    Group group;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Packet::kWords; ++i) group.words[i] = from[i];
    return Tiles::floats(group);
  }

  /// The sum over the threads, in each of them. The barrier before the next row's is the claim's.
  CUTLASS_DEVICE float sum_of_threads(float value) const {
    value = sum_of_warp(value);
    if (lane_id() == 0) shared.sums[threadIdx.x / cutlass::NumThreadsPerWarp] = value;
    named_barrier_sync<NamedBarrier::kTurnSeen, kThreads>();
    float sum = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWarps; ++i) sum += shared.sums[i];
    return sum;
  }

  struct Batch {
    int32_t first;  // the number of the thread's first group
    uint32_t there = 0;
    Part parts[kBatch];

    CUTLASS_DEVICE Batch(NormedRows const& rows, int32_t first_) : first(first_) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        parts[i] = rows.part(first + i * kThreads);
        there |= uint32_t(parts[i].count > 0) << i;
      }
    }
  };

  /// Takes out the packets of a batch that two ranks have sent, or one: `there` has a bit for each
  /// of the first, and then of the second.
  CUTLASS_DEVICE void take(int step, int source, int32_t number, uint32_t there,
                           Packet (&found)[kSources * kBatch]) const {
    ExchangeArgs const& args = tiles.args;
    char* const places = args.slots[0] + tiles.place(step, source, number, true);
    auto const at = [&](int i) {
      return reinterpret_cast<Packet*>(places + int64_t(i / kBatch) * args.stretch_bytes) +
             i % kBatch * kThreads;
    };
    uint32_t pending = there, since = 0;
    CUTLASS_PRAGMA_UNROLL
    for (Packet& packet : found) packet.flag = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    do {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSources * kBatch; ++i) {  // all are under way together
        load_packet_if((pending >> i & 1u) != 0, found[i], at(i));
      }
      uint32_t seen = 0;
      int missing = -1;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSources * kBatch; ++i) {
        if (found[i].flag == args.tag) {
          pending &= ~(1u << i);
        } else if ((pending >> i & 1u) != 0 && seen == 0) {
          missing = i < kBatch ? source : source + 1;  // rather one that called with something else
          seen = found[i].flag;
        }
      }
      if (pending == 0) break;
      bool const waits_for_first = pending % (1u << kBatch) != 0;
      bool const waits_for_second = pending >> kBatch != 0;
      since = check_exchange_wait(
          args, tiles.slot, uint32_t(waits_for_first) << source | waits_for_second << (source + 1),
          seen, missing, since);
    } while (!kNoWait);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSources * kBatch; ++i) {
      if ((there >> i & 1u) == 0) continue;
      if constexpr (kNoWait) {
        // Every packet is taken out once, with the fault too.
        int const of = i < kBatch ? source : source + 1;
        while (load_packet(at(i)).flag != args.tag) {
          since = check_exchange_wait(args, tiles.slot, 1u << of, 0, of, since);
        }
      }
      at(i)->flag = 0;
    }
  }

  /// Makes a row's new residual and returns this thread's share of the sum of its squares.
  CUTLASS_DEVICE float reduce_row(int32_t row) const {
    float squares = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t first = int32_t(threadIdx.x); first < groups; first += kBatch * kThreads) {
      Batch const batch(*this, first);
      Group weights[kBatch], result[kBatch];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        weights[i] = load(static_cast<Element const*>(norm.weight), batch.parts[i]);
      }
      if (tiles.owns_row(row)) {
        sum_batch(row, batch, result);
      } else {
        take_shared(row, batch, result);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        Part const& part = batch.parts[i];
        if (part.count == 0) continue;
        int32_t const group = first + i * kThreads;
        tiles.store_at(row, part.column, part.count, result[i]);
        keep(kept(group), result[i]);
        keep(kept_weight(group), weights[i]);
        squares += sum_of_squares(Tiles::floats(result[i]));  // past the end they are 0
      }
    }
    return squares;
  }

  using Element = typename Tiles::Element;

  CUTLASS_DEVICE static Group load(Element const* row, Part const& part) {
    return Tiles::load(row + part.column, part.count);
  }

  /// The rounded sums of a batch of a row that this rank sums.
  CUTLASS_DEVICE void sum_batch(int32_t row, Batch const& batch, Group (&result)[kBatch]) const {
    auto const& weight = tiles.params.weights[0];
    Element const* const residual = tiles.params.sink.residual;
    Group added[kBatch];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBatch; ++i) {  // they are under way with the packets
      if (residual != nullptr) added[i] = load(residual + int64_t(row) * weight.n, batch.parts[i]);
    }
    Sum sums[kBatch];
    int32_t const number = tiles.packet_of_row(row, batch.first);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int source = 0; source < tiles.args.world_size; source += kSources) {
      bool const has_second = source + 1 < tiles.args.world_size;
      Packet found[kSources * kBatch];
      take(0, source, number, batch.there | (has_second ? batch.there << kBatch : 0u), found);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        Tiles::add(sums[i], Tiles::group_of(found[i]), source == 0);
        if (has_second) Tiles::add(sums[i], Tiles::group_of(found[kBatch + i]), false);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      if (weight.epilogue.bias != nullptr) {
        Tiles::add(sums[i], load(weight.epilogue.bias, batch.parts[i]), false);
      }
      if (residual != nullptr) Tiles::add(sums[i], added[i], false);
      result[i] = Tiles::rounded(sums[i]);
      if (!tiles.is_shared() || batch.parts[i].count == 0) continue;
      tiles.send_to_all(tiles.place(1, tiles.args.rank, number + i * kThreads, true), result[i]);
    }
  }

  /// The sums of a batch that the row's owner has sent.
  CUTLASS_DEVICE void take_shared(int32_t row, Batch const& batch, Group (&result)[kBatch]) const {
    Packet found[kSources * kBatch];
    take(1, tiles.owner_of_row(row), tiles.packet_of_row(row, batch.first), batch.there, found);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBatch; ++i) result[i] = Tiles::group_of(found[i]);
  }

  CUTLASS_DEVICE void norm_row(int32_t row, float scale) const {
    int32_t const n = tiles.params.weights[0].n;
    auto* const normed = static_cast<Element*>(norm.normed) + int64_t(row) * n;
    float amax = 0;  // of this thread's columns, where a scale is that of a row
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t group = int32_t(threadIdx.x); group < groups; group += kThreads) {
      Part const found = part(group);
      if (found.count == 0) continue;
      Sum values = floats_of(kept(group));
      apply_norm(values, scale, floats_of(kept_weight(group)));
      Group const rounded = Tiles::rounded(values);
      if (norm.scales == nullptr) {
        Tiles::store(normed + found.column, found.count, rounded);
        continue;
      }
      keep(kept(group), rounded);
      values = Tiles::floats(rounded);
      float of_group = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kElements; ++i) of_group = max_or_nan(of_group, fabsf(values[i]));
      if (norm.scale_columns < n) {
        note_amax(found.column / norm.scale_columns, of_group);
      } else {
        amax = max_or_nan(amax, of_group);
      }
    }
    if (norm.scales != nullptr) quantize_row(row, amax);
  }

  // Scales. The largest values lie behind the sums of squares, by the number of the scale in its
  // row; the bits of numbers that are not negative, a NaN's too, are ordered as the numbers are.

  CUTLASS_DEVICE uint32_t* amax_of(int32_t scale) const {
    static_assert(kWarps + ceil_div(kMaxStreamedNormColumns, kScaleBlock) <=
                  int(sizeof(shared.sums) / sizeof(float)));
    return reinterpret_cast<uint32_t*>(shared.sums + kWarps) + scale;
  }
  CUTLASS_DEVICE void note_amax(int32_t scale, float amax) const {
    atomicMax(amax_of(scale), __float_as_uint(amax));
  }
  /// To be called between the claim's barrier and that of the squares.
  CUTLASS_DEVICE void clear_amax() const {
    if (norm.scales == nullptr) return;
    for (int32_t i = int32_t(threadIdx.x); i < norm.scales_of_row; i += kThreads) *amax_of(i) = 0;
  }

  CUTLASS_DEVICE void quantize_row(int32_t row, float amax) const {
    constexpr float kLargest = 448;
    int32_t const n = tiles.params.weights[0].n;
    if (norm.scale_columns >= n) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = cutlass::NumThreadsPerWarp / 2; i > 0; i /= 2) {
        amax = max_or_nan(amax, __shfl_xor_sync(0xffffffffu, amax, i));
      }
      if (lane_id() == 0) note_amax(0, amax);
    }
    named_barrier_sync<NamedBarrier::kTurnSeen, kThreads>();
    auto* const to = static_cast<uint8_t*>(norm.normed) + int64_t(row) * n;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t group = int32_t(threadIdx.x); group < groups; group += kThreads) {
      Part const found = part(group);
      if (found.count == 0) continue;
      int32_t const scale = found.column / norm.scale_columns;
      float const up = fp8_up_of(__uint_as_float(*amax_of(scale)), kLargest);
      if (found.column % norm.scale_columns == 0) {
        norm.scales[int64_t(row) * norm.scales_of_row + scale] = __frcp_rn(up);
      }
      Sum const values = floats_of(kept(group));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kElements; i += 2) {
        using Two = cutlass::NumericArrayConverter<cutlass::float_e4m3_t, float, 2>;
        cutlass::Array<float, 2> scaled;
        scaled[0] = values[i] * up;
        scaled[1] = values[i + 1] * up;
        auto const bytes = Two::convert(scaled);
        if (i >= found.count) break;
        *reinterpret_cast<uint16_t*>(to + found.column + i) =
            reinterpret_cast<uint16_t const&>(bytes);
      }
    }
  }
};

}  // namespace agmm
