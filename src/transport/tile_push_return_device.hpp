// Device side of matmul + all-reduce: beside what a matmul + reduce-scatter does (TilePush), an own
// tile, once it is whole, goes to all other ranks, and a spare warp of each CTA copies what they
// send to `out`, which is not symmetric memory.
//
// Own tiles do not come last here but a lag behind the others (LaggedOrder, with the argument why
// no ranks wait for each other in a ring). A sender sends the CTA's tiles in their order, own ones
// too, and waits for nobody once it has seen the credits; the spare warps wait for finished tiles,
// and nothing waits for them but the end of the call: so all of a rank's rows leave it, whoever is
// late, and come to it.
//
// A finished tile travels rounded, in pieces of 64 x 64 elements, row after row, the eighths of a
// row swizzled, as shared memory has them without conflicts of banks. Its owner stores the same
// bits to its own `out`: the bias is added to the accumulator before, in both.
//
// Where it lies: behind the sums at each place, tile after tile, with signals behind those of the
// sums. One credit is for both: who gives it has read all sums of the call and copied all results.
// Memory order as in tile_push_device.hpp: what it says of a tile's sums holds for results, of
// which the lanes of one warp are the readers.
#pragma once

#include <cstdint>

#include "order/lagged_order.hpp"
#include "transport/tile_push_device.hpp"

namespace agmm {

/// What the spare warps copy, and to where.
struct TileReturnArgs {
  LaggedTileOrder order{};
  char* out = nullptr;    // of this launch's rows of chunk 0
  int64_t row_bytes = 0;  // of out
  int32_t columns = 0;    // of out
};

template <class Element, int kTileM, int kTileN, int kTileThreads, int kPieces, int kBuffers>
struct TileReturn
    : TilePush<Element, kTileThreads, kTileM * kTileN / kTileThreads, kPieces, kBuffers, true> {
  using Push =
      TilePush<Element, kTileThreads, kTileM * kTileN / kTileThreads, kPieces, kBuffers, true>;
  using Push::kPieceBytes;
  using Push::kTileBytes;
  using Push::kVectorElements;
  using Push::kVectors;
  using typename Push::Storage;
  static constexpr int kPieceRows = 64;     // of an MMA, by one warpgroup
  static constexpr int kPieceColumns = 64;  // of 128 bytes
  static constexpr int kRowBytes = kPieceColumns * int(sizeof(Element));
  static_assert(kTileThreads == 128 && sizeof(Element) == 2 && kTileN % kPieceColumns == 0);
  static_assert(kPieceBytes == kPieceRows * kRowBytes);
  // A thread has the sums of an MMA across the tile, then of the next one down: so have pieces.
  static_assert(kTileM % kPieceRows == 0 && kPieces == kTileM / 64 * (kTileN / kPieceColumns));

  /// TilePush::put() of a whole tile of this rank's, for all others.
  CUTLASS_DEVICE static void put_result(Storage& storage, float const* sum, int number, int thread,
                                        int32_t rank) {
    int const lane = thread % 32;
    // The lane gives the address of this row in one of the four 8 x 8 matrices that a warp stores
    // at a time: the upper and the lower rows of 8 columns, then of the next 8.
    int const row = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
    CUTLASS_PRAGMA_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      uint32_t const i = uint32_t(number) * kPieces + piece;
      uint32_t const buffer = i % kBuffers;
      if (i >= kBuffers) mbarrier_wait(&storage.empty[buffer], (i / kBuffers - 1) % 2);
      auto const to = uint32_t(__cvta_generic_to_shared(storage.pieces[buffer])) + row * kRowBytes;
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        uint4 const four = Push::rounded(sum + (piece * kVectors + v) * kVectorElements);
        int const eighth = 2 * v + lane / 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         to + (eighth ^ row % 8) * 16),
                     "r"(four.x), "r"(four.y), "r"(four.z), "r"(four.w)
                     : "memory");
      }
      stress_delay(rank);
      if constexpr (!kNoFence) fence_proxy_async_shared();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&storage.full[buffer]);
    }
  }

  /// TilePush::send() of a tile of whichever owner, an own one to all others, each kilobyte to all
  /// of them at a time. Its signal is left to the next call, or to finish(): so the sender need not
  /// wait for copies on their way where it has others to send.
  CUTLASS_DEVICE static void send(TilePushArgs const& push, Storage& storage, int number,
                                  int32_t owner, int32_t tile, MeasuredClock const& clock,
                                  TileOnItsWay& before) {
    ScatterTiles const& tiles = push.tiles;
    bool const is_own = owner == tiles.rank;
    // The order is by the distance in the ring, so that not all ranks send to the same one at a
    // time.
    int32_t const first = is_own ? 0 : tiles.place(owner);
    int32_t const last = is_own ? tiles.world_size - 2 : first;
    int64_t const offset = int64_t(is_own ? tiles.tiles() + tile : tile) * kTileBytes;
    SendPace const pace = push.paces.of_wave(number);
    constexpr int kGroups = kPieceBytes / kSendBytes;
    int32_t cycles = 0;
    uint64_t passed = 0;
    int64_t next = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      uint32_t const i = uint32_t(number) * kPieces + piece;
      uint64_t* const full = &storage.full[i % kBuffers];
      if (piece == 0 && !mbarrier_test(full, i / kBuffers % 2)) finish(push, before);
      mbarrier_wait(full, i / kBuffers % 2);
      if (piece == 0) cycles = clock.at_its_pace(pace.cycles, push.paces.highest_clock);
      stress_delay(tiles.rank);
      auto const* const from = reinterpret_cast<char const*>(storage.pieces[i % kBuffers]);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int at = 0; at < kPieceBytes; at += kSendBytes) {
        next = Push::pause_until(next, 0) + cycles;
        CUTLASS_PRAGMA_NO_UNROLL
        for (int place = first; place <= last; ++place) {
          bulk_copy_in_group(push.peers[place].part + offset + piece * kPieceBytes + at, from + at,
                             kSendBytes);
        }
        bulk_commit();
        Push::await_few_under_way(pace.log_under_way);
      }
      if (piece == 0) {
        // All but this piece's are complete.
        if constexpr (!kReadSignal) bulk_wait<kGroups>();
        signal(push, before);
      } else {
        bulk_wait_read<kGroups>();
        mbarrier_arrive(&storage.empty[(i - 1) % kBuffers]);
      }
      passed = virtual_link_take(uint32_t(kPieceBytes * (last - first + 1)), passed);
    }
    bulk_wait_read<0>();
    mbarrier_arrive(&storage.empty[(uint32_t(number) * kPieces + kPieces - 1) % kBuffers]);
    before.owner = owner;
    before.tile = tile;
    before.passed = passed;
  }

  /// The signal of the sender's last tile.
  CUTLASS_DEVICE static void finish(TilePushArgs const& push, TileOnItsWay& last) {
    if (last.tile < 0) return;
    if constexpr (!kReadSignal) bulk_wait<0>();
    signal(push, last);
  }

  /// Copies the finished tiles that come, in the order in which they do, each `ctas`-th of them.
  /// For all lanes of a warp.
  CUTLASS_DEVICE static void copy_results(TilePushArgs const& push, TileReturnArgs const& args,
                                          int32_t cta, int32_t ctas) {
    int32_t const all = push.tiles.tiles() * (push.tiles.world_size - 1);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t i = cta; i < all; i += ctas) copy_result(push, args, i);
    __syncwarp();
    if (lane_id() == 0 && cta < all) Push::count_done(push, (all - 1 - cta) / ctas + 1);
  }

 private:
  /// Signals a tile whose copies are complete.
  CUTLASS_DEVICE static void signal(TilePushArgs const& push, TileOnItsWay& sent) {
    if (sent.tile < 0) return;
    ScatterTiles const& tiles = push.tiles;
    virtual_link_wait(sent.passed);
    stress_delay(tiles.rank);
    Push::await_late_credit(push);
    if (sent.owner == tiles.rank) {
      fence_acq_rel_system();  // once for all
      CUTLASS_PRAGMA_NO_UNROLL
      for (int place = 0; place < tiles.world_size - 1; ++place) {
        store_relaxed_system(push.peers[place].signals + tiles.tiles() + sent.tile, push.tag);
      }
    } else {
      store_release_system(push.peers[tiles.place(sent.owner)].signals + sent.tile, push.tag);
    }
    sent.tile = -1;
  }

  CUTLASS_DEVICE static void copy_result(TilePushArgs const& push, TileReturnArgs const& args,
                                         int32_t i) {
    ScatterTiles const& tiles = push.tiles;
    int32_t const number = i / (tiles.world_size - 1);
    int32_t const place = i - number * (tiles.world_size - 1);
    BlockCoord const block = args.order.own_block(number);
    int32_t const first_row = tiles.row_of(block.m * kTileM);
    int32_t const tile = tiles.tiles() + tiles.tile(first_row / kTileM, block.n);
    int32_t const source = tiles.at_place(place);
    auto const await = [&] {
      if (lane_id() != 0) return;
      uint32_t* const signal = push.signals + place * kMaxScatterTiles + tile;
      stress_delay(tiles.rank);
      wait_signal(signal, push.tag, source * kMaxScatterTiles + tile, push.limit);
      *signal = 0;
    };
    if constexpr (!kNoParts) await();
    __syncwarp();
    // Eight lanes have a row of a piece, and every fourth one, whose swizzles are two in turn.
    constexpr int kRowsApart = 4;
    constexpr int kAcross = kTileN / kPieceColumns;
    int32_t const lane = lane_id();
    char const* from =
        push.parts + place * push.part_bytes + int64_t(tile) * kTileBytes + lane * 16;
    int32_t const column = (lane % 8 ^ lane / 8) * kVectorElements;
    int32_t rows = tiles.rows - first_row - lane / 8;
    int32_t const columns = args.columns - block.n * kTileN - column;
    char* to = args.out +
               int64_t(source * tiles.chunk_stride + first_row + lane / 8) * args.row_bytes +
               int64_t(block.n * kTileN + column) * int(sizeof(Element));
    // It is the way to the other one of the lane's two columns.
    int32_t const aside =
        (column & kPieceColumns / 2) == 0 ? kPieceColumns / 2 : -kPieceColumns / 2;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int down = 0; down < kTileM; down += kPieceRows) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int row = 0; row < kPieceRows; row += 2 * kRowsApart) {
        uint4 loaded[2][kAcross];  // what a lane has under way: there is no register for more
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 2; ++j) {
          CUTLASS_PRAGMA_UNROLL
          for (int across = 0; across < kAcross; ++across) {
            loaded[j][across] = __ldcg(reinterpret_cast<uint4 const*>(from + across * kPieceBytes +
                                                                      j * kRowsApart * kRowBytes));
          }
        }
        from += 2 * kRowsApart * kRowBytes;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 2; ++j) {
          int32_t const at = j == 0 ? 0 : aside;
          CUTLASS_PRAGMA_UNROLL
          for (int across = 0; across < kAcross; ++across) {
            if (rows > 0 && across * kPieceColumns + at < columns) {
              *reinterpret_cast<uint4*>(to + (across * kPieceColumns + at) * int(sizeof(Element))) =
                  loaded[j][across];
            }
          }
          to += kRowsApart * args.row_bytes;
          rows -= kRowsApart;
        }
      }
      from += (kAcross - 1) * kPieceBytes;
    }
    // The fault waits here, so that signals and credits stay in step.
    if constexpr (kNoParts) await();
  }
};

}  // namespace agmm
