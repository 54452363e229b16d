// The scales of blocks, one for each 128 of K of a row of A, and of 128 columns or of each column
// of B: what the promotion multiplies the sums of a k tile with (promoting_mma.hpp).
//
// The consumers read them. A's are read from L2, once the tile's first k tile has come: its rows'
// scales have arrived by then, for all of K: they come with the rows or with their first chunk
// (async_input_mainloop.hpp argues the order), and such kernels do not split K.
#pragma once

#include <cstdint>
#include <numeric>

#include "agmm/problem.hpp"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "gemm/sm90/wgmma.hpp"
#include "order/chunking.hpp"

namespace agmm {

struct BlockScaleArgs {
  float const* a = nullptr;        // [rows, k_tiles]
  float const* a_local = nullptr;  // those of local_rows
  Range local_rows{};
  float* a_out = nullptr;    // [rows, k_tiles], where all are written, or null
  float const* b = nullptr;  // of k tile k and column or block of columns n: b[k * b_k + n * b_n]
  int32_t b_k = 0;
  int32_t b_n = 0;
  int32_t rows = 0;
  int32_t columns = 0;  // of a weight
  int32_t k_tiles = 0;
};

/// The scales of two weights, gate and up, which lie alike.
struct GatedBlockScaleArgs : BlockScaleArgs {
  float const* b_up = nullptr;
};

/// Where the tile begins that is in the stages from one on; written by the producer, which alone
/// knows.
struct TileStart {
  int32_t row;
  int32_t column;
};

/// The block scales of a thread's sums. A tile has kAtomsM x kAtomsN atoms, MMAs of 64 rows by
/// kColumns columns; kPerColumn: B has a scale for each column, else for 128; kIsGated: the first
/// half of a tile's columns are of gate, the others of up.
///
/// A warp has its rows to itself, so it alone loads their scales, a group of k tiles at a time, and
/// keeps them in shared memory. The next group's are loaded into registers meanwhile. Few registers
/// are left beside the sums, and little time: from where a lane loads is worked out once in a tile,
/// and kept in shared memory too.
template <int kAtomsM, int kAtomsN, int kColumns, int kWarpgroups, bool kPerColumn,
          bool kIsGated = false>
class BlockScales {
  using Args = cute::conditional_t<kIsGated, GatedBlockScaleArgs, BlockScaleArgs>;
  static constexpr int kGroup = 4;                        // k tiles whose scales a warp has at hand
  static constexpr int kWarpRows = 16 * kAtomsM;          // of a warp: 16 in an atom
  static constexpr int kLoads = kWarpRows * kGroup / 32;  // of a lane
  static constexpr int kFloats = kColumns / 2;            // of the thread, in an atom
  static constexpr int kTileColumns = kAtomsN * kColumns;
  /// Tiles begin at multiples of kStep in a block of B, and in an atom kSame columns are of one.
  static constexpr int kStep = std::gcd(kTileColumns, kScaleBlock);
  static constexpr int kSame = std::gcd(std::gcd(kColumns, kTileColumns), kScaleBlock);
  static constexpr int kBlocks =
      kPerColumn ? 0 : (kScaleBlock - kStep + kTileColumns + kScaleBlock - 1) / kScaleBlock;
  static constexpr int kFactors = kPerColumn ? kFloats : 2 * kColumns / kSame;
  static_assert(kColumns <= kScaleBlock, "an atom has columns of two blocks at most");
  static_assert(kBlocks * kGroup <= 32);
  static_assert(!kIsGated || (!kPerColumn && kTileColumns == 2 * kScaleBlock),
                "a tile has a scale block of each weight");

 public:
  /// What one warp has in shared memory.
  struct Held {
    /// Where each lane's loads of a tile begin, at the lane's k tile of the first group.
    struct alignas(16) From {
      float const* a[kLoads];
    } from_a[32];
    float const* from_b[32];
    float a[kWarpRows * kGroup];  // of a row one after the other
    float b[cute::max(kBlocks, 1) * kGroup];
    TileStart start;
  };

  CUTLASS_DEVICE BlockScales(Args const& args, TileStart const* starts, Held* held, int thread)
      : args_(args), starts_(starts), held_(held[thread / 32]), thread_(thread) {}

  /// Comes before any other function, once the first k tile is in stage `stage` and before it is
  /// multiplied: there are registers for it then.
  CUTLASS_DEVICE void begin(int stage) {
    TileStart const start = starts_[stage];
    if (kPerColumn || kSame != kScaleBlock) column_ = start.column;
    uint32_t const lane = this->lane();
    int const first_row = start.row + thread_ / 32 * 16;  // of the warp's
    if (lane == 0) held_.start = {first_row, start.column};
    int const k = lane % kGroup;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      // Rows that only pad the tile, whose sums are not stored, take the last one's.
      int const row = min_of(first_row + row_of_load(lane, i), args_.rows - 1);
      bool const is_local = args_.local_rows.begin <= row && row < args_.local_rows.end;
      held_.from_a[lane].a[i] =
          is_local ? args_.a_local + ((row - args_.local_rows.begin) * args_.k_tiles + k)
                   : args_.a + (row * args_.k_tiles + k);
    }
    if constexpr (kIsGated) {
      float const* const of_weight = lane < kGroup ? args_.b : args_.b_up;
      held_.from_b[lane] = of_weight + (k * args_.b_k + start.column / kTileColumns * args_.b_n);
    } else if constexpr (!kPerColumn) {
      int const block = min_of(start.column / kScaleBlock + int(lane / kGroup),
                               (args_.columns - 1) / kScaleBlock);
      held_.from_b[lane] = args_.b + (k * args_.b_k + block * args_.b_n);
    }
    load(0, lane);
  }

  /// The sums of k tile `k`, from 0 on, are being computed.
  CUTLASS_DEVICE void next(int k) {
    k_ = k;
    if (k % kGroup == 0) {
      uint32_t const lane = this->lane();
      keep(k, lane);
      load(k + kGroup, lane);
    }
    if constexpr (kPerColumn) bring_near(k + 1);
  }

  /// Prepares the scales of an atom's sums, in the layout of the MMA, before the sums are there.
  CUTLASS_DEVICE void prepare(int m, int n) {
    int const of_row = (16 * m + thread_ % 32 / 4) * kGroup + k_ % kGroup;
    float const rows[2] = {held_.a[of_row], held_.a[of_row + 8 * kGroup]};
    if constexpr (kPerColumn) {
      int const column = column_ + fragment_column(thread_) + n * kColumns;
      int const left = args_.columns - column;  // a multiple of 8 beyond the thread's own
      float const* const of_k = args_.b + (k_ * args_.columns + column);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFloats; i += 4) {
        float2 of_columns{0, 0};
        if (2 * i < left) of_columns = __ldg(reinterpret_cast<float2 const*>(of_k + 2 * i));
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          factor_[i + 2 * r] = rows[r] * of_columns.x;
          factor_[i + 2 * r + 1] = rows[r] * of_columns.y;
        }
      }
    } else if constexpr (kSame == kScaleBlock) {
      float const of_block = held_.b[n * kGroup + k_ % kGroup];
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) factor_[r] = rows[r] * of_block;
    } else {
      int const begin = column_ % kScaleBlock + n * kColumns;  // of the atom, in the tile's blocks
      int const block = begin / kScaleBlock;
      int const left = kScaleBlock - begin % kScaleBlock;  // columns of the first block
      float const* const of_b = held_.b + block * kGroup + k_ % kGroup;
      float const of_block[2] = {of_b[0], of_b[block + 1 < kBlocks ? kGroup : 0]};
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        float const first = rows[r] * of_block[0];
        float const second = rows[r] * of_block[1];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kColumns / kSame; ++i) {
          factor_[2 * i + r] = i * kSame < left ? first : second;
        }
      }
    }
    // The fences have the factors made here, not when the MMA has ended and the tensor cores may
    // have nothing to do.
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kFactors; ++i) cute::warpgroup_fence_operand(factor_[i]);
  }

  /// `sum` and what the i-th of the atom's sums adds to it.
  CUTLASS_DEVICE float times(float sum, float part, int i) const {
    return fmaf(part, factor_[kPerColumn ? i : 8 * (i / 4) / kSame * 2 + i / 2 % 2], sum);
  }

 private:
  /// Read again by each caller, not kept in a register.
  CUTLASS_DEVICE static uint32_t lane() {
    uint32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }

  /// B's scales of k tile `k` to L1, from where prepare() reads them: a warp loads one of each 32
  /// bytes, and looks at it when it loads the next ones.
  CUTLASS_DEVICE void bring_near(int k) {
    constexpr int kSector = 32 / sizeof(float);
    static_assert(kTileColumns <= 32 * kSector);
    asm volatile("" ::"f"(near_));
    int const in_tile = thread_ % 32 * kSector;
    int const column = column_ + in_tile;
    if (k < args_.k_tiles && in_tile < kTileColumns && column < args_.columns) {
      near_ = __ldg(args_.b + k * args_.columns + column);
    }
  }

  /// Loads the scales of the group that begins at k tile `k` into registers, where nothing awaits
  /// them.
  CUTLASS_DEVICE void load(int k, uint32_t lane) {
    if (k + int(lane % kGroup) >= args_.k_tiles) return;
    typename Held::From const from = held_.from_a[lane];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) of_a_[i] = __ldcg(from.a[i] + k);
    if (!kPerColumn && lane < kBlocks * kGroup) of_b_ = __ldg(held_.from_b[lane] + k * args_.b_k);
  }

  /// What was loaded, from k tile `k` on, to where prepare() reads it: once all lanes have read the
  /// last group.
  CUTLASS_DEVICE void keep(int k, uint32_t lane) {
    __syncwarp();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) held_.a[lane + 32 * i] = of_a_[i];
    if (!kPerColumn && lane < kBlocks * kGroup) held_.b[lane] = of_b_;
    __syncwarp();
    if (args_.a_out == nullptr) return;
    TileStart const start = held_.start;
    int const k_tile = k + int(lane % kGroup);
    // The tiles of the first columns have all rows.
    if (start.column != 0 || k_tile >= args_.k_tiles) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      int const row = start.row + row_of_load(lane, i);
      if (row < args_.rows) args_.a_out[row * args_.k_tiles + k_tile] = of_a_[i];
    }
  }

  /// The row of the lane's i-th load, counted from the warp's first row.
  CUTLASS_DEVICE static int row_of_load(uint32_t lane, int i) {
    int const row = (lane + 32 * i) / kGroup;  // of the warp's
    return kAtomRows * kWarpgroups * (row / 16) + row % 16;
  }

  Args const& args_;
  TileStart const* const starts_;
  Held& held_;
  int const thread_;
  int column_ = 0;  // the tile's first
  int k_ = 0;
  float of_a_[kLoads] = {};  // of the group to come
  float of_b_ = 0;
  float factor_[kFactors];
  float near_ = 0;
};

/// The block scales of a mainloop that is made of the collective `Base`.
template <class Base, Accumulation kAccumulation, bool kIsGated = false>
struct MainloopScales {
  static constexpr bool kScalesBlocks = is_block_scaled(kAccumulation);
  static constexpr int kThreads = cute::size(typename Base::TiledMma{});
  static_assert(!kScalesBlocks || kThreads == 256,
                "the warps of cooperative kernels have scales of their own");
  using SumsLayout = typename decltype(cute::partition_fragment_C(
      typename Base::TiledMma{}, cute::take<0, 2>(typename Base::TileShape{})))::layout_type;
  using Scales =
      BlockScales<cute::size<1>(SumsLayout{}), cute::size<2>(SumsLayout{}),
                  2 * cute::size<0>(SumsLayout{}), kThreads / cutlass::NumThreadsPerWarpGroup,
                  kAccumulation == Accumulation::Block1x128, kIsGated>;
  struct None {};
  struct InSharedMemory {
    TileStart tile_starts[Base::DispatchPolicy::Stages];  // by the stage of the first k tile
    typename Scales::Held scales[kThreads / cutlass::NumThreadsPerWarp];
  };
  /// A base of the mainloop's shared memory.
  using Storage = cute::conditional_t<kScalesBlocks, InSharedMemory, None>;
};

}  // namespace agmm
