// The order of a matmul + all-reduce, host and device: that of a matmul + reduce-scatter, but each
// rank's own rows follow the others' at a fixed lag, so that the finished rows go to the other
// ranks while the matmul goes on.
//
// Every rank computes w chunks of as many blocks, the others' and its own, in one sequence of
// steps. The blocks of a chunk are taken in groups. A period has the same group of all others'
// chunks, in the order of scatter_owner(), and then, from period `lag` on, the own group `lag`
// periods before it:
//   others' 0 | others' 1 | others' 2, own 0 | others' 3, own 1 | ... | own n - 2 | own n - 1
//
// Why no ranks wait for each other in a ring. Which chunk, by its position, and which block of it a
// step computes depends on the step alone, not on the rank. So rank r's own block j, at step p of
// all ranks, waits for parts that the others compute at steps before p: those of block j of every
// position. Say that all steps before p end on all ranks. A worker takes its steps one after the
// other, in ascending order; so each gets to its step p. Where that is others' block, it waits for
// nothing but the worker's steps before; where it is an own one, for the others' parts too, whose
// steps are over. So step p ends on all ranks. Nothing waits for what finished rows become on other
// ranks but the end of the call.
//
// That needs the same groups and the same lag on all ranks, whatever their numbers of workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "order/chunking.hpp"

namespace agmm {

/// The blocks of a chunk in a group, and the groups by which own tiles lag.
struct Lag {
  int32_t group = 1;
  int32_t groups = 0;
};

/// A step as its place in the order of a matmul + reduce-scatter, which is chunk after chunk.
struct LaggedOrder {
  int32_t world_size = 1;
  int32_t blocks = 0;  // of a chunk
  int32_t whole = 0;   // groups before the last one, which may have fewer blocks
  int32_t lag = 0;     // groups, at most `whole`
  int32_t head = 0;    // steps of the periods that have no own group
  int32_t middle = 0;  // and of those with both, without the last period
  FastDiv group{};
  FastDiv last{};  // blocks of the last group
  FastDiv head_period{};
  FastDiv period{};

  LaggedOrder() = default;

  AGMM_HOST_DEVICE LaggedOrder(int32_t world_size_, int32_t blocks_, Lag const& lag_)
      : world_size(world_size_),
        blocks(blocks_),
        whole(max_of(0, ceil_div(blocks_, lag_.group) - 1)),
        lag(min_of(lag_.groups, whole)),
        head(lag * (world_size_ - 1) * lag_.group),
        middle((whole - lag) * world_size_ * lag_.group),
        group(lag_.group),
        last(max_of(1, blocks_ - whole * lag_.group)),
        head_period(max_of(1, (world_size_ - 1) * lag_.group)),
        period(world_size_ * lag_.group) {}

  AGMM_HOST_DEVICE int32_t count() const { return world_size * blocks; }

  /// The chunk's position (scatter_owner) times `blocks`, and the block.
  AGMM_HOST_DEVICE int32_t place(int32_t step) const {
    if (step < head) {
      int32_t const of = head_period.divide(step);
      return in_period(step - of * head_period.divisor, of * group.divisor);
    }
    step -= head;
    if (step < middle) {
      int32_t const of = period.divide(step);
      step -= of * period.divisor;
      bool const is_own = step >= (world_size - 1) * group.divisor;
      return in_period(step, (is_own ? of : of + lag) * group.divisor);
    }
    step -= middle;
    int32_t const others = (world_size - 1) * last.divisor;
    if (step < others) {
      int32_t const position = last.divide(step);
      return position * blocks + whole * group.divisor + step - position * last.divisor;
    }
    return (world_size - 1) * blocks + (whole - lag) * group.divisor + step - others;
  }

  /// The step of the i-th own block.
  AGMM_HOST_DEVICE int32_t own_step(int32_t i) const {
    int32_t const of = group.divide(i);
    int32_t const left = i - (whole - lag) * group.divisor;
    if (left >= 0) return head + middle + (world_size - 1) * last.divisor + left;
    return head + of * period.divisor + (world_size - 1) * group.divisor + group.remainder(i);
  }

 private:
  AGMM_HOST_DEVICE int32_t in_period(int32_t step, int32_t first_block) const {
    int32_t const position = group.divide(step);
    return position * blocks + first_block + step - position * group.divisor;
  }
};

/// TileOrder's blocks in a lagged order. The chunks are as long as each other, in whole blocks.
struct LaggedTileOrder : TileOrder {
  LaggedOrder lagged{};

  LaggedTileOrder() = default;
  LaggedTileOrder(TileOrder const& order, Lag const& lag)
      : TileOrder(order),
        lagged(order.chunks.chunks_m, order.count() / order.chunks.chunks_m, lag) {}

  AGMM_HOST_DEVICE BlockCoord block_at(int32_t step) const {
    return TileOrder::block_at(lagged.place(step));
  }
  /// The own blocks in their order. Those of all ranks are as many rows into their chunks.
  AGMM_HOST_DEVICE BlockCoord own_block(int32_t i) const {
    return TileOrder::block_at((lagged.world_size - 1) * lagged.blocks + i);
  }
};

/// The lag for so many workers: own blocks, but for the first and the last, are computed a wave of
/// steps behind the last of their parts, which then have the time of a tile to come. In groups so
/// small that a wave has both, and of a size with which the own blocks, whose results go to all
/// ranks, are spread evenly over the workers, of which each takes every `workers`-th step.
inline Lag lag_for(int32_t world_size, int32_t blocks, int32_t workers) {
  constexpr int32_t kSmallest = 8;
  constexpr int32_t kLargest = 24;
  int32_t const wave = max_of(1, workers);
  Lag best{max_of(1, blocks), 0};
  int32_t fewest = blocks + 1;  // own blocks of the worker that has the most
  for (int32_t group = kSmallest; group <= kLargest && group < blocks; ++group) {
    int32_t const period = world_size * group;
    Lag const lag{group, max_of(1, ceil_div(wave - group, period))};
    LaggedOrder const order(world_size, blocks, lag);
    std::vector<int32_t> own(static_cast<std::size_t>(wave));
    int32_t most = 0;
    for (int32_t i = 0; i < blocks; ++i) {
      most = max_of(most, ++own[static_cast<std::size_t>(order.own_step(i) % wave)]);
    }
    if (most < fewest) {
      fewest = most;
      best = lag;
    }
  }
  return best;
}

}  // namespace agmm
