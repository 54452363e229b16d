// Device side of matmul + reduce-scatter: a tile of another rank's chunk goes to its owner as soon
// as it is computed, and what the others sent is added to an own tile.
//
// Of one CTA, with consumers (the warps that multiply) and a sender (a warp beside them):
//   consumers   tile -> buffers, piece by piece | next tile ... | own tile: wait, add, store
//   sender      credits | piece -> owner, piece -> owner | complete | signal | ...
// A tile is complete, and its signal follows, once the next one's first piece is on its way; or at
// once where the sender has no other to send, or is to wait for others.
// Where consumers wait while their sums are added (a cooperative kernel's), the sender waits for
// the others' sums of an own tile and brings them to the buffers, which nothing leaves by then,
// while the tile is computed. Consumers that take turns (pingpong) load them themselves, while the
// others compute.
//
// Who waits for whom, and why it ends. All tiles of other ranks' chunks come before the own tiles
// (ScatterTiles, TileOrder), and CTAs claim them in that order (claimed_steps.hpp). A sender
// waits for credits, which peers give at the end of the call before, and then for nobody but its
// own CTA; while it does, no signal is held back. So all tiles are sent, whoever is late, and own
// tiles, which wait for nothing else, have what they wait for. How many CTAs are on the GPU
// together does not matter.
//
// How fast. A link that has more to carry than it can makes the multiprocessors' stores wait, and
// with them the loads that the next tile wants: what was to be hidden behind a matmul then adds to
// it. CTAs finish their tiles at about the same time, so each sends no more than its share, in
// small copies, of which a few are not complete (SendPace). The pace is one in time, kept in cycles
// of a clock that is measured, since it falls under a matmul.
//
// Memory order.
//   Out. Consumers write a piece to shared memory, each thread executes fence.proxy.async, the warp
//   meets, one lane arrives at the buffer's mbarrier; the sender's test acquires, and its bulk copy
//   (async proxy) reads what they wrote. The sender waits until its copies are complete, not just
//   read, and then releases the tile's signal at system scope.
//   In. One lane for each source acquires its signal at system scope; a barrier of the consumers
//   carries that to all of them, and they load with ordinary loads, past L1. Or the sender's lane
//   acquires it, executes fence.proxy.async and copies to a buffer, whose mbarrier the copy
//   completes; consumers test that and read, and arrive at another before the next copy to it.
//   Again. An owner's loads come before a barrier of the consumers, or a completed mbarrier which
//   its sender tests, that before the addition to `done` (acquire-release), the last of which
//   before the credit (release, system scope). The CTA that takes the credits acquires them at
//   system scope and releases `go`; every sender acquires that, executes fence.proxy.async and only
//   then copies. Signals are reset by the lane that saw them, before the same: so before the credit
//   that lets a peer write them again. A credit is taken before `go`, and a peer gives the next one
//   only when it has this call's tiles, which come after `go`. `go` and `done` are reset by who
//   makes `done` full, which takes the addition of everyone who looks at `go`, made when it has
//   seen it: who has nothing to send does not look.
#pragma once

#include <cstdint>

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"
#include "sync/bulk_copy.hpp"
#include "sync/device_wait.hpp"
#include "sync/mbarrier.hpp"
#include "sync/named_barrier.hpp"
#include "testing/fault.hpp"
#include "testing/stress_delay.hpp"
#include "testing/virtual_link.hpp"
#include "transport/tile_push.hpp"

namespace agmm {

/// The clock of a multiprocessor from begin() on. Of one thread.
class MeasuredClock {
 public:
  CUTLASS_DEVICE void begin() {
    cycles_ = uint32_t(clock64());
    ns_ = uint32_t(global_timer_ns());
  }

  /// What takes as long by this clock as `cycles` by one of `highest` cycles per ns. The counters
  /// pass 2^32 every two and four seconds, behind a peer that is so late; then it is too few
  /// cycles, but no less than half.
  CUTLASS_DEVICE int32_t at_its_pace(int32_t cycles, float highest) const {
    float const passed = float(uint32_t(clock64()) - cycles_);
    float const ns = float(uint32_t(global_timer_ns()) - ns_);
    return int32_t(float(cycles) * fminf(1.0f, fmaxf(0.5f, __fdividef(passed, ns * highest))));
  }

 private:
  uint32_t cycles_ = 0;
  uint32_t ns_ = 0;
};

/// What a sender has sent and not signalled.
struct TileOnItsWay {
  int32_t owner = 0;
  int32_t tile = -1;  // -1: none
  uint64_t passed = 0;
};

/// The push of a CTA whose tiles are computed by `kTileThreads` threads, `kFloats` elements in
/// each. A tile travels in fragment order: vector by vector of 8 elements, thread by thread; its
/// owner's same kernel has the same threads. It leaves in pieces, through `kBuffers` buffers of one
/// each. `kReturns`: own tiles go to all other ranks, once they are whole (TileReturn).
template <class Element, int kTileThreads_, int kFloats, int kPieces, int kBuffers,
          bool kReturns = false>
struct TilePush {
  static constexpr int kTileThreads = kTileThreads_;
  static constexpr int kVectorElements = 16 / int(sizeof(Element));
  static constexpr int kVectors = kFloats / kVectorElements / kPieces;  // of a thread, in a piece
  static constexpr int kPieceBytes = kVectors * kTileThreads * 16;
  static constexpr int kTileBytes = kPieces * kPieceBytes;
  static constexpr int kWarps = kTileThreads / 32;
  static_assert(kFloats % (kVectorElements * kPieces) == 0);
  static_assert(kPieceBytes % kSendBytes == 0);
  static_assert(kBuffers >= 2);
  using Vector = cutlass::Array<Element, kVectorElements>;

  struct Storage {
    alignas(128) uint4 pieces[kBuffers][kPieceBytes / sizeof(uint4)];
    alignas(8) uint64_t full[kBuffers];
    uint64_t empty[kBuffers];
    uint64_t fetched[kBuffers];
    uint64_t taken[kBuffers];
  };

  /// One thread calls it, before a barrier of the CTA.
  CUTLASS_DEVICE static void init(Storage& storage) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBuffers; ++i) {
      mbarrier_init(&storage.full[i], kWarps);
      mbarrier_init(&storage.empty[i], 1);
      mbarrier_init(&storage.fetched[i], 1);
      mbarrier_init(&storage.taken[i], kWarps);
    }
  }

  /// The consumers' share of sending: the tile is the `number`-th of the CTA that does not stay.
  CUTLASS_DEVICE static void put(Storage& storage, float const* sum, int number, int thread,
                                 int32_t rank) {
    CUTLASS_PRAGMA_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      uint32_t const i = uint32_t(number) * kPieces + piece;
      uint32_t const buffer = i % kBuffers;
      // Free in the first turn; then the phase that ended in the turn before.
      if (i >= kBuffers) mbarrier_wait(&storage.empty[buffer], (i / kBuffers - 1) % 2);
      // The fault is what the fence rules out: the sender reads before the writes are to be seen.
      if (kNoFence && thread % 32 == 0) mbarrier_arrive(&storage.full[buffer]);
      uint4* const to = storage.pieces[buffer] + thread;
      if constexpr (kNoFence) stress_delay(rank);
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        to[v * kTileThreads] = rounded(sum + (piece * kVectors + v) * kVectorElements);
      }
      stress_delay(rank);
      if constexpr (kNoFence) continue;
      fence_proxy_async_shared();
      __syncwarp();
      if (thread % 32 == 0) mbarrier_arrive(&storage.full[buffer]);
    }
  }

  /// The sender's. For one lane, once it has seen `go`. `number`: of the CTA's tiles, and so of the
  /// wave. `clock`: begun before the first tile. The tile's signal is left to the next call, or to
  /// finish(): so the sender need not wait for copies on their way where it has others to send.
  CUTLASS_DEVICE static void send(TilePushArgs const& push, Storage& storage, int number,
                                  int32_t owner, int32_t tile, MeasuredClock const& clock,
                                  TileOnItsWay& before) {
    TilePushArgs::Peer const& peer = push.peers[push.tiles.place(owner)];
    char* const to = peer.part + int64_t(tile) * kTileBytes;
    SendPace const pace = push.paces.of_wave(number);
    constexpr int kGroups = kPieceBytes / kSendBytes;
    int32_t cycles = 0;
    uint32_t released = uint32_t(number) * kPieces;
    uint64_t passed = 0;
    int64_t next = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      uint32_t const i = uint32_t(number) * kPieces + piece;
      uint64_t* const full = &storage.full[i % kBuffers];
      if (piece == 0 && (tile < 0 || !mbarrier_test(full, i / kBuffers % 2))) finish(push, before);
      mbarrier_wait(full, i / kBuffers % 2);
      if (piece == 0) {
        cycles = clock.at_its_pace(pace.cycles, push.paces.highest_clock);
        next = clock64();
      }
      // A tile that only pads goes nowhere.
      if (tile >= 0) {
        stress_delay(push.tiles.rank);
        auto const* const from = reinterpret_cast<char const*>(storage.pieces[i % kBuffers]);
        CUTLASS_PRAGMA_NO_UNROLL
        for (int at = 0; at < kPieceBytes; at += kSendBytes) {
          // The fault is what the wait for copies rules out: the signal is seen before the last.
          if (kReadSignal && piece == kPieces - 1 && at == 0) {
            store_release_system(peer.signals + tile, push.tag);
            stress_delay(push.tiles.rank);
          }
          next = pause_until(next, kCatchUp * cycles) + cycles;
          bulk_copy_to_global(to + piece * kPieceBytes + at, from + at, kSendBytes);
          await_few_under_way(pace.log_under_way);
        }
        if (piece == 0) {
          // All but this piece's are complete.
          bulk_wait<kGroups>();
          signal(push, before);
        }
        // The pieces before have left their buffers.
        bulk_wait_read<kGroups>();
        passed = virtual_link_take(kPieceBytes, passed);
      }
      if (i != released) mbarrier_arrive(&storage.empty[released++ % kBuffers]);
    }
    if (tile >= 0) bulk_wait_read<0>();
    for (; released != uint32_t(number + 1) * kPieces; ++released) {
      mbarrier_arrive(&storage.empty[released % kBuffers]);
    }
    if (tile >= 0) before = {owner, kReadSignal ? -1 : tile, passed};
  }

  /// The signal of the sender's last tile. Before it waits for anybody else, and at the end.
  CUTLASS_DEVICE static void finish(TilePushArgs const& push, TileOnItsWay& last) {
    if (last.tile < 0 && !kReadSignal) return;
    bulk_wait<0>();
    signal(push, last);
  }

  /// Brings to L2 what has no place in the buffers yet. All lanes call it, before fetch().
  CUTLASS_DEVICE static void prefetch(TilePushArgs const& push, int32_t tile) {
    int const part = lane_id();
    if (part * kPieces < kBuffers || part >= push.tiles.world_size - 1) return;
    bulk_prefetch(part_of(push, push.tiles.place_by_arrival(part), tile), kTileBytes);
  }

  /// The sender's share of an own tile: what the others sent for it comes to the buffers, in the
  /// order of ScatterTiles::place_by_arrival. For one lane, behind all that it sends. `number`: of
  /// the CTA's own tiles.
  CUTLASS_DEVICE static void fetch(TilePushArgs const& push, Storage& storage, int number,
                                   int32_t tile) {
    int const others = push.tiles.world_size - 1;
    uint32_t i = uint32_t(number) * others * kPieces;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int part = 0; part < others; ++part) {
      int32_t const place = push.tiles.place_by_arrival(part);
      uint32_t* const signal = signal_of(push, place, tile);
      stress_delay(push.tiles.rank);
      if constexpr (!kNoParts) wait_part(push, signal, place, tile);
      fence_proxy_async_global();
      char const* const from = part_of(push, place, tile);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int piece = 0; piece < kPieces; ++piece, ++i) {
        uint32_t const buffer = i % kBuffers;
        if (i >= kBuffers) mbarrier_wait(&storage.taken[buffer], (i / kBuffers - 1) % 2);
        bulk_copy_to_shared(storage.pieces[buffer], from + piece * kPieceBytes, kPieceBytes,
                            &storage.fetched[buffer]);
      }
      // The fault waits here, so that signals and credits stay in step.
      if constexpr (kNoParts) wait_part(push, signal, place, tile);
      *signal = 0;
    }
  }

  /// Returns when all that the sender fetched for `count` own tiles has come, and its source may be
  /// written again.
  CUTLASS_DEVICE static void await_fetched(TilePushArgs const& push, Storage& storage, int count) {
    uint32_t const end = uint32_t(count) * (push.tiles.world_size - 1) * kPieces;
    CUTLASS_PRAGMA_NO_UNROLL
    for (uint32_t i = end < kBuffers ? 0 : end - kBuffers; i < end; ++i) {
      mbarrier_wait(&storage.fetched[i % kBuffers], i / kBuffers % 2);
    }
  }

  /// Adds what the sender fetches for an own tile to its sum. For all kTileThreads.
  CUTLASS_DEVICE static void add_fetched(TilePushArgs const& push, Storage& storage, float* sum,
                                         int number, int thread) {
    int const others = push.tiles.world_size - 1;
    uint32_t i = uint32_t(number) * others * kPieces;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int part = 0; part < others; ++part) {
      CUTLASS_PRAGMA_UNROLL
      for (int piece = 0; piece < kPieces; ++piece, ++i) {
        uint32_t const buffer = i % kBuffers;
        mbarrier_wait(&storage.fetched[buffer], i / kBuffers % 2);
        uint4 const* const from = storage.pieces[buffer] + thread;
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          add(from[v * kTileThreads], sum + (piece * kVectors + v) * kVectorElements);
        }
        __syncwarp();
        if (thread % 32 == 0) mbarrier_arrive(&storage.taken[buffer]);
      }
    }
    scale(push, sum);
  }

  /// Adds what the others sent for an own tile to its sum, in the order of ScatterTiles::
  /// place_by_arrival. For all kTileThreads.
  template <bool kLoadsAhead>
  CUTLASS_DEVICE static void add_parts(TilePushArgs const& push, float* sum, int32_t tile,
                                       int thread) {
    constexpr int kAll = kPieces * kVectors;
    int const others = push.tiles.world_size - 1;
    // Thread i waits for the i-th sum. All look at once, so that sums that are there cost one look.
    int32_t const place = thread < others ? push.tiles.place_by_arrival(thread) : 0;
    uint32_t* const signal = signal_of(push, place, tile);
    stress_delay(push.tiles.rank);
    bool is_awaited = thread < others && load_acquire_system(signal) != push.tag;
    auto const from = [&](int i) {
      char const* const part = part_of(push, push.tiles.place_by_arrival(i), tile);
      return reinterpret_cast<uint4 const*>(part) + thread;
    };
    uint4 loaded[kAll];
    bool is_loaded = false;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < others; ++i) {
      if (thread == i && is_awaited && !kNoParts) {
        wait_part(push, signal, place, tile);
        is_awaited = false;
      }
      // kLoadsAhead: a sum that is there is loaded while the one before is added.
      bool const is_last = i + 1 == others;
      bool const is_next_late = named_barrier_any<NamedBarrier::kPartsAdded, kTileThreads>(
          thread == i + 1 && is_awaited && !kNoParts);
      if (!is_loaded) load(from(i), loaded);
      is_loaded = kLoadsAhead && !is_last && !is_next_late;
      uint4 const* const next = from(is_last ? i : i + 1);
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < kAll; ++v) {
        add(loaded[v], sum + v * kVectorElements);
        if (is_loaded) loaded[v] = __ldcg(next + v * kTileThreads);
      }
    }
    // The fault waits here, so that signals and credits stay in step.
    if (kNoParts && is_awaited) wait_part(push, signal, place, tile);
    if (thread < others) *signal = 0;
    scale(push, sum);
    sync();
    if (thread == 0) count_done(push, 1);
  }

  /// `count` more tiles are sent, or their sums are read; where they are returned, also own ones
  /// sent, or others' copied. By one thread, for others behind a barrier. Who makes them all gives
  /// the credits.
  CUTLASS_DEVICE static void count_done(TilePushArgs const& push, int32_t count) {
    if (count == 0) return;
    uint32_t const before = add_acq_rel_gpu(push.done, uint32_t(count));
    int32_t const all = push.tiles.all_tiles() * (kReturns ? 2 : 1);
    if (before + uint32_t(count) != uint32_t(all)) return;
    *push.done = 0;
    *push.go = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int place = 0; place < push.tiles.world_size - 1; ++place) {
      store_release_system(push.peers[place].credit, 1);
    }
  }

  /// One CTA takes the credits, which cannot be seen any more afterwards: the one that computes
  /// step 0, a tile to send or a part of its sum, which is the first of its own.
  CUTLASS_DEVICE static bool takes_credits(int32_t step) {
    return step == 0 && cute::block_rank_in_cluster() == 0;
  }

  /// All lanes of a sender's warp call it before the first send. The sender counts what it sends
  /// (count_done), and `go` is reset once all is counted.
  CUTLASS_DEVICE static void await_credits(TilePushArgs const& push, int32_t first_step) {
    if (takes_credits(first_step)) {
      take_credits(push);
    } else {
      await_go(push);
    }
  }

  /// The wait of the CTA that takes the credits. It may send nothing: whoever sends comes behind
  /// it, so `go` is not reset before it is set.
  CUTLASS_DEVICE static void take_credits(TilePushArgs const& push) {
    stress_delay(push.tiles.rank);
    uint32_t since = 0;
    int const place = lane_id();
    if (place < push.tiles.world_size - 1) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (;;) {
        uint32_t const seen = load_acquire_system(push.credits + place);
        if (seen == 1) break;
        check_credit_wait(seen, push.tiles.at_place(place), 0, push.limit, since);
      }
    }
    if (place < push.tiles.world_size - 1) push.credits[place] = 0;
    __syncwarp();
    if (place == 0) store_release_gpu(push.go, 1);
    __syncwarp();
    fence_proxy_async_global();
  }

  /// The wait of the CTAs that do not take the credits.
  CUTLASS_DEVICE static void await_go(TilePushArgs const& push) {
    stress_delay(push.tiles.rank);
    if (!kNoCredit && lane_id() == 0) look_for_go(push);
    __syncwarp();
    fence_proxy_async_global();
  }

  /// Comes before a signal. With the fault all CTAs but the one that takes the credits write
  /// without one, and await it here: signals and credits stay in step, and wrong elements are all
  /// that comes of the fault.
  CUTLASS_DEVICE static void await_late_credit(TilePushArgs const& push) {
    if constexpr (kNoCredit) look_for_go(push);
  }

  /// Tells the sender whether the whole sum is its CTA's, where several CTAs share a tile's K. All
  /// threads of consumers and sender call it, and wait for each other.
  CUTLASS_DEVICE static bool tell_sender(bool is_whole) {
    return named_barrier_any<NamedBarrier::kSumMade, kTileThreads + 32>(is_whole);
  }
  CUTLASS_DEVICE static bool is_told_whole() { return tell_sender(false); }

 protected:
  // This is the grace of a wait for a chunk too (device_wait.hpp).
  static constexpr uint32_t kLateUnits = 64;
  static constexpr int32_t kCatchUp = 4;  // copies

  /// Returns the time from which the next pause counts: `when`, or where that has passed, at most
  /// `caught_up` cycles ago: what a sender loses by waiting for something else it makes up for.
  CUTLASS_DEVICE static int64_t pause_until(int64_t when, int32_t caught_up) {
    int64_t const now = clock64();
    int64_t const earliest = now - caught_up;
    if (now >= when) return when > earliest ? when : earliest;
    while (clock64() < when) {
    }
    return when;
  }

  /// Signals a tile whose copies are complete.
  CUTLASS_DEVICE static void signal(TilePushArgs const& push, TileOnItsWay& sent) {
    if (sent.tile < 0) return;
    virtual_link_wait(sent.passed);
    stress_delay(push.tiles.rank);
    await_late_credit(push);
    store_release_system(push.peers[push.tiles.place(sent.owner)].signals + sent.tile, push.tag);
    sent.tile = -1;
  }

  /// Returns when all but 2^log of the copies are complete.
  CUTLASS_DEVICE static void await_few_under_way(int32_t log) {
    static_assert(kLogFewestUnderWay == 2 && kLogMostUnderWay == 5);
    if (log == 2) {
      bulk_wait<(1 << 2) - 1>();
    } else if (log == 3) {
      bulk_wait<(1 << 3) - 1>();
    } else if (log == 4) {
      bulk_wait<(1 << 4) - 1>();
    } else {
      bulk_wait<(1 << 5) - 1>();
    }
  }

  CUTLASS_DEVICE static void look_for_go(TilePushArgs const& push) {
    uint32_t since = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    while (load_acquire_gpu(push.go) != 1) {
      // The CTA that takes the credits reports, which knows whose is missing; should it not run,
      // this one.
      if (waited_units(since) > 2 * limit_units(push.limit) + kLateUnits) {
        report_and_stop(push.limit, WaitReport::Timeout, -1, -1, 0, 1,
                        uint64_t(waited_units(since)) << kLogWaitUnitNs);
      }
    }
  }

  CUTLASS_DEVICE static void sync() {
    named_barrier_sync<NamedBarrier::kPartsAdded, kTileThreads>();
  }

  CUTLASS_DEVICE static uint4 rounded(float const* from) {
    cutlass::Array<float, kVectorElements> floats;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectorElements; ++i) floats[i] = from[i];
    Vector const vector =
        cutlass::NumericArrayConverter<Element, float, kVectorElements>::convert(floats);
    return reinterpret_cast<uint4 const&>(vector);
  }

  CUTLASS_DEVICE static uint32_t* signal_of(TilePushArgs const& push, int32_t place, int32_t tile) {
    return push.signals + place * kMaxScatterTiles + tile;
  }

  CUTLASS_DEVICE static char const* part_of(TilePushArgs const& push, int32_t place, int32_t tile) {
    return push.parts + place * push.part_bytes + int64_t(tile) * kTileBytes;
  }

  CUTLASS_DEVICE static void wait_part(TilePushArgs const& push, uint32_t const* signal,
                                       int32_t place, int32_t tile) {
    int32_t const chunk = push.tiles.at_place(place) * kMaxScatterTiles + tile;
    wait_signal(signal, push.tag, chunk, push.limit);
  }

  template <int kAll>
  CUTLASS_DEVICE static void load(uint4 const* part, uint4 (&loaded)[kAll]) {
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kAll; ++v) loaded[v] = __ldcg(part + v * kTileThreads);
  }

  CUTLASS_DEVICE static void add(uint4 const& vector, float* sum) {
    auto const floats = cutlass::NumericArrayConverter<float, Element, kVectorElements>::convert(
        reinterpret_cast<Vector const&>(vector));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectorElements; ++i) sum[i] += floats[i];
  }

  CUTLASS_DEVICE static void scale(TilePushArgs const& push, float* sum) {
    if (push.scale == 1.0f) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kFloats; ++i) sum[i] *= push.scale;
  }
};

}  // namespace agmm
