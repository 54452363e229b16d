// The matmul of rows that are grouped by expert, each expert's with its own matrix, as one
// persistent kernel over the tiles of all experts (order/grouped_tiles.hpp).
//
// It multiplies transposed: rows of A are columns of the wgmma, which has any multiple of 8. So the
// last tile of an expert loads and multiplies a quarter, a half or three quarters of what a whole
// one does, and experts with few rows waste little. No load or product is of two experts' tiles;
// the loads of a tile may bring rows of the next expert, whose products are not stored.
//   warp 0        counts the blocks of each expert, then loads A
//   warp 1        makes the barriers, then loads B
//   warp 2        loads the scales of A's rows, with fp8
//   warps 4 to 11 multiply and store: a group of two warpgroups that share a tile (cooperative), or
//                 two groups of one warpgroup that take tiles in turn (pingpong)
// A cluster is kClusterN tiles side by side, which share the loads of A: each CTA loads a part of
// the rows for all. They are of one expert, and of the same rows.
//
// What comes from the device. No size of the launch depends on the offsets: the grid is that of the
// most blocks which any offsets can make, and a CTA without one does nothing. Offsets are clamped
// (GroupedOrder::rows_of_expert), so that wrong ones reach no memory beyond out, and all warps of a
// cluster see the same blocks: they read the same words, which no kernel writes meanwhile.
//
// Early start (GroupedMatmul::starts_early). The kernel ahead in the stream, an ordinary launch,
// lets this one start when all its CTAs run, so that neither keeps the other from its
// multiprocessors. All that this one reads is older than the kernel ahead, but for the rows, whose
// counts it waits for; what it writes the kernel ahead does not touch. Its end waits for the end of
// that one, so that what follows in the stream comes behind both.
//
// Rows on their way (RowArrival). Before the first load of a tile, warp 0 waits until all rows of
// the tile have come: each lane acquires the counts of some sources, the warp's barrier carries
// that to the lane that loads, whose proxy fence orders its loads behind it (sync/device_wait.hpp).
// Warp 1 loads B meanwhile, as far as the ring goes. Rows of a neighbouring tile that a load brings
// too may not have come; their products are not stored. In a cluster each CTA waits for itself: the
// part that one loads for the other is of the same rows, for which it has waited too.
//
// The ring. Stage i of kStages has `full` (2 arrivals: of warps 0 and 1, each of which expects the
// bytes that it loads, and A's bytes, from all CTAs that share them; with fp8 one of warp 2 too,
// behind its stores of scales, which are of its own CTA alone) and `empty` (one arrival of
// each warp of a group, in each CTA that shares the loads of A). All warps go through the same
// tiles and k tiles, or skip a tile's stages as a whole, so each counts the uses of a stage for
// itself, and use u of it is phase u of both barriers.
//   1. Warps 0, 1 and 2 write to a stage for use u behind phase u - 1 of `empty`: all that read use
//      u - 1 have, in all CTAs to which warp 0 sends. Phase u of `full` has not ended then in any
//      of them, since each wants an arrival of its own warp 0, which comes behind the same wait. So
//      bytes that another CTA sends early are counted in their phase, though its barrier may not
//      have been told to expect them yet.
//   2. A use belongs to one tile, and a tile to one group, the same in all CTAs of the cluster. So
//      exactly that group's warps arrive at `empty` for it, and the count is the same for both
//      groups. A warp arrives when its wgmmas that read the stage have ended: those of a stage are
//      one batch, and at most one batch is behind it when the warp waits for all but the last.
//   3. Two groups take turns (`turn`, 4 arrivals, of the other group's warps): a group begins a
//   tile
//      when the other's warps have seen all stages of the tile before it full. So phase u - 1 of
//      `full` is over in every stage for whose phase u a warp waits. Without that it would take the
//      end of phase u - 2, whose parity is the same, for that of phase u. The turns themselves
//      alternate, so neither group is ahead of the other's arrivals by two phases.
//   4. Nobody waits for what comes behind him: a load waits for the products kStages before it, a
//      product for its load, a store for its products. Other CTAs are waited for only inside a
//      cluster, whose CTAs run at the same time.
//   5. Warp 0 ends behind the last phases of `empty`: then all of A has landed, here and in the
//      CTAs to which it was sent, and no other CTA will arrive at a barrier of this one's ring, or
//      write to its memory. What warp 1 loads lands before the phases of `full` that it belongs to
//      end, so before those of `empty`.
//
// The results. A warpgroup writes kStagedRows rows of 64 columns to shared memory and reads them as
// whole rows, so that every store of a warp is 4 rows of 128 bytes; only rows of the tile's expert
// and columns of out are stored. There are two such buffers, with one barrier of the warpgroup
// between what is written and read: a thread that writes to a buffer again has passed the barrier
// of the other one, at which all arrived behind their reads of this one.
//
// Shared memory has no conflicts of banks: TMA writes, and wgmma reads, in the pattern of 128-byte
// swizzles, which the staged rows have too.
//
// fp8. The tensor cores add fp8 products with fewer bits than float32 has, so each k tile, 128 of
// K, is summed up anew, and its sums times the scales of the row and of the column or scale block
// are added to float32 registers. Scales of rows and columns are those of every k tile. A's scales
// come with the rows: warp 2 waits for these as warp 0 does, and reads the scales from L2. A warp
// gives a stage back when all its lanes have read the stage's scales.
//
// Bits. The sum of a row goes through K in steps of 16, with fp8 of 128, whatever tile it lies in.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "agmm/grouped_matmul.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "gemm/sm90/element_types.hpp"
#include "gemm/sm90/epilogue_policy.hpp"
#include "gemm/sm90/wgmma.hpp"
#include "order/grouped_tiles.hpp"
#include "sync/bulk_copy.hpp"
#include "sync/device_wait.hpp"
#include "sync/mbarrier.hpp"
#include "sync/named_barrier.hpp"
#include "sync/tensor_load.hpp"
#include "testing/fault.hpp"
#include "testing/stress_delay.hpp"

namespace agmm {

/// kTileM rows and kTileN columns of B are a CTA's tile; with a gate half of them are gate's.
template <class Operands, BLayout kBLayout_, int kTileM_, int kTileN_, int kClusterN_,
          Schedule kSchedule, Epilogue kEpilogue>
struct GroupedKernel {
  using Element = typename TypesOf<Operands>::A;
  using Out = typename TypesOf<Operands>::Out;
  static constexpr bool kIsScaled = TypesOf<Operands>::kIsFp8;
  using Policy = EpiloguePolicy<kEpilogue, Out, false>;
  static constexpr BLayout kBLayout = kBLayout_;
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kClusterN = kClusterN_;
  static constexpr int kWeights = Policy::kColumnsPerOut;
  static constexpr bool kIsGated = kWeights == 2;
  static_assert(kEpilogue != Epilogue::Activation, "no grouped matmul has one of a single weight");
  static_assert(std::is_same_v<Element, typename TypesOf<Operands>::B>);
  static_assert(!kIsScaled || kBLayout == BLayout::ColumnMajor, "the MMA reads fp8 along K only");

  static constexpr int kThreads = 384;
  static constexpr int kFirstMultiplyingWarp = 4;
  static constexpr int kGroups = kSchedule == Schedule::Cooperative ? 1 : 2;
  static constexpr int kWarpgroupsOfGroup = 2 / kGroups;
  static constexpr int kWarpsOfGroup = 4 * kWarpgroupsOfGroup;
  /// CUTLASS's kernels of two warpgroups that multiply have these registers too.
  static constexpr int kLoadRegisters = kIsScaled ? 56 : 40;
  static constexpr int kMultiplyRegisters = kIsScaled ? 224 : 232;
  static constexpr int kSharedBytes = 227 * 1024;  // that a CTA may have

  static constexpr int kRowBytes = 128;  // of a k tile, and of what is staged
  static constexpr int kTileK = kRowBytes / int(sizeof(Element));
  static constexpr int kAtomColumns = 64;  // of B in one wgmma's rows
  static constexpr int kAtomsOfTile = kTileN / kAtomColumns;
  static constexpr int kAtoms = kAtomsOfTile / kWarpgroupsOfGroup;  // of a warpgroup
  static constexpr int kAtomsOfOut = kAtoms / kWeights;
  static constexpr int kOutColumns = kTileN / kWeights;  // of a tile
  static constexpr int kAtomBytes = kAtomColumns * kRowBytes;
  static constexpr int kWeightBytes = kAtomsOfTile * kAtomBytes;
  static constexpr int kBytesOfA = kTileM * kRowBytes;
  static constexpr int kQuarterRows = kTileM / kTileQuarters;
  static_assert(kTileN % (kAtomColumns * kWarpgroupsOfGroup * kWeights) == 0);
  static_assert(kOutColumns <= 256, "a box of TMA");
  static_assert(kClusterN <= 2, "a tile beyond the last column is moved by one tile");
  static_assert(kQuarterRows % (8 * kClusterN) == 0, "each CTA of a cluster loads whole atoms");
  static_assert(kQuarterRows % 16 == 0, "a warp stages 16 rows at once");
  static_assert((kAtoms + int(kIsScaled)) * kTileM / 2 <= 128,
                "sums, with fp8 those of a k tile too, that leave registers for the rest");

  static constexpr int kStagedRows = kQuarterRows;
  static constexpr int kStagedBytes = kStagedRows * kRowBytes;
  static constexpr int kOtherBytes = 3072;  // blocks of experts, barriers, alignment
  static constexpr int kScaleBytes = kIsScaled ? kTileM * int(sizeof(float)) : 0;  // of a stage
  static constexpr int kStages = min_of(
      (kSharedBytes - 4 * kStagedBytes - kOtherBytes) / (kWeightBytes + kBytesOfA + kScaleBytes),
      16);
  static_assert(kStages >= 3);

  struct Shared {
    alignas(1024) uint8_t weight[kStages][kWeightBytes];
    alignas(1024) uint8_t a[kStages][kBytesOfA];
    alignas(1024) uint8_t staged[2][2][kStagedBytes];  // of each warpgroup
    alignas(16) float scale[kIsScaled ? kStages : 1][kIsScaled ? kTileM : 1];
    uint64_t full[kStages];
    uint64_t empty[kStages];
    uint64_t turn[2];  // of each group
    int32_t first_block[kMostExperts + 1];
  };
  static_assert(sizeof(Shared) <= kSharedBytes);

  struct Params {
    CUtensorMap weight[kWeights];
    CUtensorMap a[kTileQuarters];  // boxes of that many quarters, the part of one CTA
    GroupedOrder order{};
    int32_t const* offsets = nullptr;
    RowArrival arrival{};
    WaitLimit wait_limit{};
    Out const* bias[kWeights] = {};
    RowsScales scales{};
    ExpertScales weight_scales[kWeights] = {};
    Out* out = nullptr;
    int32_t out_columns = 0;
    int32_t k_tiles = 0;
    int32_t clusters = 0;
    bool starts_early = false;
    bool clears_rest = true;
    Activation activation = Activation::Relu;

    int32_t ctas() const { return clusters * kClusterN; }
  };

  CUTLASS_DEVICE static void run(Params const& params, char* memory) {
    auto& shared = *reinterpret_cast<Shared*>(memory);
    int const warp = cutlass::canonical_warp_idx_sync();
    if (warp == 0) {
      count_blocks(params, shared);
    } else if (warp == 1 && lane_id() == 0) {
      make_barriers(params, shared);
    }
    // Behind this barrier all threads see the blocks and the barriers of their CTA, behind the
    // cluster's those of the others.
    __syncthreads();
    if constexpr (kClusterN > 1) {
      cluster_arrive();
      cluster_wait();
    }
    if (warp >= kFirstMultiplyingWarp) {
      cutlass::arch::warpgroup_reg_alloc<kMultiplyRegisters>();
      multiply(params, shared, (warp - kFirstMultiplyingWarp) / 4);
      return;
    }
    cutlass::arch::warpgroup_reg_dealloc<kLoadRegisters>();
    if (warp == 0) {
      load_a(params, shared);
    } else if (warp == 1) {
      load_weight(params, shared);
    } else if (kIsScaled && warp == 2) {
      load_scales(params, shared);
    }
  }

 private:
  /// A place in the ring, as one warp counts it.
  struct Stage {
    int32_t index = 0;
    uint32_t phase = 0;

    CUTLASS_DEVICE void advance() {
      if (++index == kStages) {
        index = 0;
        phase ^= 1;
      }
    }
    CUTLASS_DEVICE void skip(int32_t stages) {
      int32_t const reached = index + stages;
      phase ^= uint32_t(reached / kStages) & 1;
      index = reached % kStages;
    }
  };

  CUTLASS_DEVICE static int32_t cluster() { return int32_t(blockIdx.x) / kClusterN; }
  CUTLASS_DEVICE static int32_t beside() { return int32_t(blockIdx.x) % kClusterN; }

  CUTLASS_DEVICE static Range rows_of_expert(Params const& params, int32_t expert) {
    return params.order.rows_of_expert(__ldg(params.offsets + expert),
                                       __ldg(params.offsets + expert + 1));
  }

  CUTLASS_DEVICE static GroupedBlock block_at(Params const& params, Shared const& shared,
                                              int32_t block) {
    int32_t const expert = expert_of_block(shared.first_block, params.order.experts, block);
    RowArrival const& arrival = params.arrival;
    int32_t const first_row =
        arrival.arrived == nullptr
            ? 0
            : __ldg(arrival.begins + expert * arrival.sources + arrival.first_source);
    return params.order.block_of_expert(expert, rows_of_expert(params, expert),
                                        block - shared.first_block[expert], first_row);
  }

  /// The first column of a CTA's tile in each weight, and in out.
  CUTLASS_DEVICE static int32_t column_of(GroupedBlock const& block) {
    return (block.column_block * kClusterN + beside()) * kOutColumns;
  }

  CUTLASS_DEVICE static int32_t blocks(Params const& params, Shared const& shared) {
    return shared.first_block[params.order.experts];
  }

  /// One warp calls it.
  CUTLASS_DEVICE static void count_blocks(Params const& params, Shared& shared) {
    int32_t const experts = params.order.experts;
    int32_t before = 0;
    for (int32_t first = 0; first < experts; first += cutlass::NumThreadsPerWarp) {
      int32_t const expert = first + lane_id();
      int32_t const own =
          expert < experts ? params.order.blocks_of_expert(rows_of_expert(params, expert)) : 0;
      int32_t until = own;  // the blocks of this lane's expert and of those before it
      CUTLASS_PRAGMA_UNROLL
      for (int lanes = 1; lanes < cutlass::NumThreadsPerWarp; lanes *= 2) {
        int32_t const of_lower = __shfl_up_sync(0xffffffffu, until, lanes);
        if (lane_id() >= lanes) until += of_lower;
      }
      if (expert < experts) shared.first_block[expert] = before + until - own;
      before += __shfl_sync(0xffffffffu, until, cutlass::NumThreadsPerWarp - 1);
    }
    if (lane_id() == 0) shared.first_block[experts] = before;
  }

  CUTLASS_DEVICE static void make_barriers(Params const& params, Shared& shared) {
    for (auto const& weight : params.weight) prefetch_descriptor(&weight);
    for (auto const& a : params.a) prefetch_descriptor(&a);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], kIsScaled ? 3 : 2);
      mbarrier_init(&shared.empty[i], kWarpsOfGroup * kClusterN);
    }
    for (uint64_t& turn : shared.turn) mbarrier_init(&turn, kWarpsOfGroup);
    fence_mbarriers_made();
    fence_proxy_async_shared();
  }

  CUTLASS_DEVICE static void load_weight(Params const& params, Shared& shared) {
    if (lane_id() != 0) return;
    Stage stage;
    int32_t const end = blocks(params, shared);
    for (int32_t number = cluster(); number < end; number += params.clusters) {
      GroupedBlock const block = block_at(params, shared, number);
      int32_t column = column_of(block);
      // A tile that only pads its cluster takes the columns before: TMA fills what does not exist
      // slowly. Its results are not stored.
      if (column >= params.out_columns) column -= kOutColumns;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t k = 0; k < params.k_tiles; ++k, stage.advance()) {
        uint64_t* const full = &shared.full[stage.index];
        mbarrier_wait(&shared.empty[stage.index], stage.phase ^ 1);
        stress_delay(params.wait_limit.rank);
        mbarrier_arrive_expecting(full, kWeightBytes);  // what lies beyond a weight counts too
        uint8_t* to = shared.weight[stage.index];
        CUTLASS_PRAGMA_UNROLL
        for (auto const& weight : params.weight) {
          if constexpr (kBLayout == BLayout::ColumnMajor) {
            tensor_load_of(to, &weight, k * kTileK, column, block.expert, full);
          } else {
            CUTLASS_PRAGMA_UNROLL
            for (int at = 0; at < kOutColumns; at += kAtomColumns) {
              tensor_load_of(to + at * kRowBytes, &weight, column + at, k * kTileK, block.expert,
                             full);
            }
          }
          to += kOutColumns * kRowBytes;
        }
      }
    }
  }

  /// Returns when the rows of a tile have come that belong to it. All lanes of the warp that loads
  /// call it; each waits for some of the sources.
  CUTLASS_DEVICE static void await_rows(Params const& params, GroupedBlock const& block) {
    RowArrival const& arrival = params.arrival;
    Range const rows = block.rows.rows;
    int32_t const experts = params.order.experts;
    int32_t const* const begins = arrival.begins + block.expert * arrival.sources;
    for (int32_t source = lane_id(); source < arrival.sources;
         source += cutlass::NumThreadsPerWarp) {
      int32_t const begin = __ldg(begins + source);
      int32_t const end = source + 1 < arrival.sources ? __ldg(begins + source + 1)
                                                       : __ldg(params.offsets + block.expert + 1);
      if (max_of(begin, rows.begin) < min_of(end, rows.end)) {
        int32_t const signal = source * experts + block.expert;
        if constexpr (kNoWait) continue;
        wait_signal(arrival.arrived + signal, uint32_t(end - begin), signal, params.wait_limit);
      }
    }
    __syncwarp();
    fence_proxy_async_global();
  }

  CUTLASS_DEVICE static void load_a(Params const& params, Shared& shared) {
    bool const issues = lane_id() == 0;
    Stage stage;
    int32_t const end = blocks(params, shared);
    for (int32_t number = cluster(); number < end; number += params.clusters) {
      GroupedBlock const block = block_at(params, shared, number);
      if (params.arrival.arrived != nullptr) await_rows(params, block);
      if (!issues) continue;
      GroupedRows const& tile = block.rows;
      int32_t const loaded = tile.quarters * kQuarterRows;
      int32_t const own = beside() * (loaded / kClusterN);  // the first that this CTA loads
      void const* const descriptor = &params.a[tile.quarters - 1];
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t k = 0; k < params.k_tiles; ++k, stage.advance()) {
        uint64_t* const full = &shared.full[stage.index];
        mbarrier_wait(&shared.empty[stage.index], stage.phase ^ 1);
        stress_delay(params.wait_limit.rank);
        mbarrier_arrive_expecting(full, uint32_t(loaded) * kRowBytes);
        uint8_t* const to = shared.a[stage.index] + own * kRowBytes;
        if constexpr (kClusterN == 1) {
          tensor_load(to, descriptor, k * kTileK, tile.first_row, full);
        } else {
          constexpr uint16_t kAll = (1u << kClusterN) - 1;
          tensor_load_for(kAll, to, descriptor, k * kTileK, tile.first_row + own, full);
        }
      }
    }
    // A stage that was never used has nobody to wait for, as at the start.
    for (int32_t i = 0; issues && i < kStages; ++i, stage.advance()) {
      mbarrier_wait(&shared.empty[stage.index], stage.phase ^ 1);
    }
  }

  /// Loads the scales of the rows of each tile. What lies behind the last row takes that one's.
  CUTLASS_DEVICE static void load_scales(Params const& params, Shared& shared) {
    constexpr int kRowsOfLane = kTileM / cutlass::NumThreadsPerWarp;
    constexpr int kAtOnce = 8 / kRowsOfLane;  // k tiles, whose loads are under way together
    static_assert(kAtOnce >= 1);
    Stage stage;
    int32_t const end = blocks(params, shared);
    for (int32_t number = cluster(); number < end; number += params.clusters) {
      GroupedBlock const block = block_at(params, shared, number);
      if (params.arrival.arrived != nullptr) await_rows(params, block);
      float const* from[kRowsOfLane];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowsOfLane; ++i) {
        int32_t const row =
            min_of(block.rows.first_row + lane_id() + cutlass::NumThreadsPerWarp * i,
                   params.order.rows - 1);
        from[i] = params.scales.at + int64_t(row) * params.scales.stride_row;
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t k = 0; k < params.k_tiles; k += kAtOnce) {
        float held[kAtOnce][kRowsOfLane];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kAtOnce; ++j) {
          // A k tile beyond the last takes the scales of that one, which are not kept.
          int64_t const at = min_of(k + j, params.k_tiles - 1) * params.scales.stride_k;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kRowsOfLane; ++i) held[j][i] = __ldcg(from[i] + at);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kAtOnce; ++j) {
          if (k + j < params.k_tiles) {
            mbarrier_wait(&shared.empty[stage.index], stage.phase ^ 1);
            stress_delay_warp(params.wait_limit.rank);
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kRowsOfLane; ++i) {
              shared.scale[stage.index][lane_id() + cutlass::NumThreadsPerWarp * i] = held[j][i];
            }
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(&shared.full[stage.index]);
            stage.advance();
          }
        }
      }
    }
  }

  using Sums = float[kAtoms][kTileM / 2];

  template <int kFloats>
  CUTLASS_DEVICE static void fence(Sums& sums) {
    CUTLASS_PRAGMA_UNROLL
    for (auto& of_atom : sums) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFloats; ++i) cute::warpgroup_fence_operand(of_atom[i]);
    }
  }

  /// Gives a stage back for a warp, in each CTA that shares the loads of A.
  CUTLASS_DEVICE static void give_back(Shared& shared, int32_t stage) {
    if constexpr (kClusterN == 1) {
      if (lane_id() == 0) mbarrier_arrive(&shared.empty[stage]);
    } else if (lane_id() < kClusterN) {
      mbarrier_arrive_in_cluster(&shared.empty[stage], lane_id());
    }
  }

  /// Multiplies the k tiles of a tile of which kQuarters are loaded. part: the warpgroup's number
  /// in its group. `loaded()` is called when all stages of the tile have been full.
  template <int kQuarters, class Loaded>
  CUTLASS_DEVICE static void multiply_tile(Params const& params, Shared& shared, int32_t part,
                                           Stage& stage, Sums& sums, Loaded const& loaded) {
    using cute::GMMA::Major;
    constexpr int kRows = kQuarters * kQuarterRows;
    constexpr int kFloats = kRows / 2;
    constexpr bool kIsColumnMajor = kBLayout == BLayout::ColumnMajor;
    using Mma = Wgmma<Element, Element, kRows, kIsColumnMajor ? Major::K : Major::MN, Major::K>;
    constexpr int kSteps = kTileK / Mma::kDepth;
    constexpr int kStepBytes = Mma::kDepth * int(sizeof(Element));
    // Row-major B has 64 rows of K, of 64 columns each, in an atom.
    constexpr int kStepBytesOfB = kIsColumnMajor ? kStepBytes : Mma::kDepth * kRowBytes;
    int32_t last = stage.index;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t k = 0; k < params.k_tiles; ++k, stage.advance()) {
      mbarrier_wait(&shared.full[stage.index], stage.phase);
      stress_delay_warp(params.wait_limit.rank);
      uint8_t const* const of_a = shared.a[stage.index];
      uint8_t const* const of_b = shared.weight[stage.index] + part * (kAtomsOfOut * kAtomBytes);
      fence<kFloats>(sums);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        uint64_t const a = wgmma_descriptor(of_a + step * kStepBytes);
        CUTLASS_PRAGMA_UNROLL
        for (int atom = 0; atom < kAtoms; ++atom) {
          // The atoms of a weight follow one another, those of all warpgroups.
          int const in_stage =
              atom / kAtomsOfOut * (kAtomsOfOut * kWarpgroupsOfGroup) + atom % kAtomsOfOut;
          uint64_t const b = wgmma_descriptor(of_b + in_stage * kAtomBytes + step * kStepBytesOfB);
          Mma::fma(reinterpret_cast<float (&)[kFloats]>(sums[atom]), b, a,
                   int32_t(k > 0 || step > 0));
        }
      }
      cute::warpgroup_commit_batch();
      if (k > 0) {
        cute::warpgroup_wait<1>();
        give_back(shared, last);
      }
      fence<kFloats>(sums);
      last = stage.index;
    }
    loaded();
    cute::warpgroup_wait<0>();
    fence<kFloats>(sums);
    give_back(shared, last);
  }

  /// Where the scales of a thread's two columns of an atom begin, at the first k tile.
  CUTLASS_DEVICE static float const* scale_of_column(Params const& params, int32_t expert,
                                                     int weight, int32_t column) {
    ExpertScales const& scales = params.weight_scales[weight];
    int32_t const given = min_of(column, params.out_columns - 1);
    return scales.at + expert * scales.stride_expert + given / scales.columns * scales.stride_n;
  }

  /// multiply_tile() of fp8.
  template <int kQuarters, class Loaded>
  CUTLASS_DEVICE static void multiply_scaled(Params const& params, Shared& shared,
                                             GroupedBlock const& block, int32_t part, Stage& stage,
                                             Sums& sums, Loaded const& loaded) {
    using cute::GMMA::Major;
    constexpr int kRows = kQuarters * kQuarterRows;
    constexpr int kFloats = kRows / 2;
    using Mma = Wgmma<Element, Element, kRows, Major::K, Major::K>;
    constexpr int kSteps = kTileK / Mma::kDepth;
    auto const thread = int32_t(threadIdx.x) % cutlass::NumThreadsPerWarpGroup;
    float const* of_columns[kAtoms][2];
    CUTLASS_PRAGMA_UNROLL
    for (int atom = 0; atom < kAtoms; ++atom) {
      int32_t const first = column_of(block) + part * (kAtomsOfOut * kAtomColumns) +
                            atom % kAtomsOfOut * kAtomColumns + fragment_row(thread);
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        of_columns[atom][half] =
            scale_of_column(params, block.expert, atom / kAtomsOfOut, first + 8 * half);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFloats; ++i) sums[atom][i] = 0;
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t k = 0; k < params.k_tiles; ++k, stage.advance()) {
      mbarrier_wait(&shared.full[stage.index], stage.phase);
      stress_delay_warp(params.wait_limit.rank);
      uint8_t const* const of_a = shared.a[stage.index];
      uint8_t const* const of_b = shared.weight[stage.index] + part * (kAtomsOfOut * kAtomBytes);
      float const* const of_rows = shared.scale[stage.index] + fragment_column(thread);
      CUTLASS_PRAGMA_UNROLL
      for (int atom = 0; atom < kAtoms; ++atom) {
        int const in_stage =
            atom / kAtomsOfOut * (kAtomsOfOut * kWarpgroupsOfGroup) + atom % kAtomsOfOut;
        float of_tile[kFloats];
        fence_floats(of_tile);
        cute::warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int step = 0; step < kSteps; ++step) {
          int const bytes = step * Mma::kDepth * int(sizeof(Element));
          Mma::fma(of_tile, wgmma_descriptor(of_b + in_stage * kAtomBytes + bytes),
                   wgmma_descriptor(of_a + bytes), int32_t(step > 0));
        }
        cute::warpgroup_commit_batch();
        float scale[2];
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          int64_t const at = k * params.weight_scales[atom / kAtomsOfOut].stride_k;
          scale[half] = __ldg(of_columns[atom][half] + at);
        }
        cute::warpgroup_wait<0>();
        fence_floats(of_tile);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kFloats; i += 4) {
          auto const of_two = *reinterpret_cast<float2 const*>(of_rows + 2 * i);
          CUTLASS_PRAGMA_UNROLL
          for (int half = 0; half < 2; ++half) {
            float& first = sums[atom][i + 2 * half];
            float& second = sums[atom][i + 2 * half + 1];
            first = fmaf(of_tile[i + 2 * half], of_two.x * scale[half], first);
            second = fmaf(of_tile[i + 2 * half + 1], of_two.y * scale[half], second);
          }
        }
      }
      __syncwarp();
      give_back(shared, stage.index);
    }
    loaded();
  }

  template <int kFloats>
  CUTLASS_DEVICE static void fence_floats(float (&floats)[kFloats]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kFloats; ++i) cute::warpgroup_fence_operand(floats[i]);
  }

  /// The sums of a tile, of as many quarters as it has.
  template <int kQuarters, class Loaded>
  CUTLASS_DEVICE static void sum_up(Params const& params, Shared& shared, GroupedBlock const& block,
                                    int32_t part, Stage& stage, Sums& sums, Loaded const& loaded) {
    if constexpr (kIsScaled) {
      multiply_scaled<kQuarters>(params, shared, block, part, stage, sums, loaded);
    } else {
      multiply_tile<kQuarters>(params, shared, part, stage, sums, loaded);
    }
  }

  CUTLASS_DEVICE static void multiply(Params const& params, Shared& shared, int32_t warpgroup) {
    int32_t const group = kGroups == 1 ? 0 : warpgroup;
    int32_t const part = kGroups == 1 ? warpgroup : 0;
    Stage stage;
    if (group > 0) stage.skip(group * params.k_tiles);
    int32_t buffer = 0;
    uint32_t turn = 0;  // the parity of this group's next one
    int32_t const end = blocks(params, shared);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t number = cluster() + group * params.clusters; number < end;
         number += kGroups * params.clusters) {
      GroupedBlock const block = block_at(params, shared, number);
      Sums sums;
      // The first group's first tile waits for nobody.
      if constexpr (kGroups > 1) mbarrier_wait(&shared.turn[group], turn ^ uint32_t(group == 0));
      turn ^= 1;
      auto const loaded = [&] {
        if constexpr (kGroups > 1) {
          if (lane_id() == 0) mbarrier_arrive(&shared.turn[1 - group]);
        }
      };
      if (block.rows.quarters == 4) {
        sum_up<4>(params, shared, block, part, stage, sums, loaded);
      } else if (block.rows.quarters == 3) {
        sum_up<3>(params, shared, block, part, stage, sums, loaded);
      } else if (block.rows.quarters == 2) {
        sum_up<2>(params, shared, block, part, stage, sums, loaded);
      } else {
        sum_up<1>(params, shared, block, part, stage, sums, loaded);
      }
      if constexpr (kGroups > 1) stage.skip((kGroups - 1) * params.k_tiles);
      store(params, shared, block, warpgroup, part, buffer, sums);
    }
    if (params.clears_rest) clear_rest(params);
    if (params.starts_early) wait_for_previous_kernel();
  }

  CUTLASS_DEVICE static void sync_warpgroup(int32_t warpgroup) {
    if (warpgroup == 0) {
      named_barrier_sync<NamedBarrier::kStagedByFirst, cutlass::NumThreadsPerWarpGroup>();
    } else {
      named_barrier_sync<NamedBarrier::kStagedBySecond, cutlass::NumThreadsPerWarpGroup>();
    }
  }

  CUTLASS_DEVICE static float bias_of(Params const& params, int weight, int32_t expert,
                                      int32_t column) {
    // Nothing is added to gate and up then, where -0 keeps a sum of -0.
    if (params.bias[weight] == nullptr) return kIsGated ? -0.0f : OfOneWeight::kNoBias;
    if (column >= params.out_columns) return 0;  // only pads the tile
    return float(params.bias[weight][int64_t(expert) * params.out_columns + column]);
  }
  using OfOneWeight = EpilogueMath<Epilogue::Bias>;

  /// Finishes the sums of a tile and stores those of its rows.
  CUTLASS_DEVICE static void store(Params const& params, Shared& shared, GroupedBlock const& block,
                                   int32_t warpgroup, int32_t part, int32_t& buffer, Sums& sums) {
    auto const thread = int32_t(threadIdx.x) % cutlass::NumThreadsPerWarpGroup;
    int32_t const tile_column = column_of(block) + part * (kAtomsOfOut * kAtomColumns);
    CUTLASS_PRAGMA_UNROLL
    for (int atom = 0; atom < kAtomsOfOut; ++atom) {
      int32_t const column = tile_column + atom * kAtomColumns;
      float bias[kWeights][2];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kWeights; ++i) {
        bias[i / 2][i % 2] =
            bias_of(params, i / 2, block.expert, column + fragment_row(thread) + 8 * (i % 2));
      }
      if constexpr (kIsGated) {
        with_activation(params.activation, [&](auto function) {
          stage_atom(params, shared, block.rows, warpgroup, column, buffer, [&](int i) {
            int const half = i / 2 % 2;
            return Policy::Math::finish(sums[atom][i] + bias[0][half],
                                        sums[atom + kAtomsOfOut][i] + bias[1][half], function);
          });
        });
      } else {
        stage_atom(params, shared, block.rows, warpgroup, column, buffer,
                   [&](int i) { return sums[atom][i] + bias[0][i / 2 % 2]; });
      }
    }
  }

  /// Stores 64 columns of a tile. `result(i)`: what comes of the i-th sum of an atom, which is
  /// 8 * (i / 4) + i % 2 rows of A, and 8 * (i / 2 % 2) columns of B further than the first.
  template <class Result>
  CUTLASS_DEVICE static void stage_atom(Params const& params, Shared& shared,
                                        GroupedRows const& tile, int32_t warpgroup, int32_t column,
                                        int32_t& buffer, Result const& result) {
    auto const thread = int32_t(threadIdx.x) % cutlass::NumThreadsPerWarpGroup;
    constexpr int kPieces = kRowBytes / 16;  // of a row
    int32_t const piece_column = column + thread % kPieces * kAlignment;
    CUTLASS_PRAGMA_UNROLL
    for (int quarter = 0; quarter < kTileQuarters; ++quarter) {
      if (quarter < tile.quarters) {
        uint8_t* const staged = shared.staged[warpgroup][buffer];
        CUTLASS_PRAGMA_UNROLL
        for (int row = 0; row < kStagedRows; row += 16) {
          // Two atoms of 8 rows, of 8 columns each, and of the next 8.
          uint32_t of_atoms[4];
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 4; ++i) {
            int const first = (quarter * kStagedRows + row) / 2 + 2 * i;
            cutlass::AlignedArray<Out, 2> two;
            two[0] = Out(result(first));
            two[1] = Out(result(first + 1));
            of_atoms[i] = *reinterpret_cast<uint32_t const*>(&two);
          }
          stage_16_rows(staged + row * kRowBytes, thread, of_atoms);
        }
        sync_warpgroup(warpgroup);
        int32_t const first_row = tile.first_row + quarter * kStagedRows;
        CUTLASS_PRAGMA_UNROLL
        for (int at = 0; at < kStagedRows; at += cutlass::NumThreadsPerWarpGroup / kPieces) {
          int32_t const in_staged = at + thread / kPieces;
          int32_t const row = first_row + in_staged;
          bool const is_stored =
              row >= tile.rows.begin && row < tile.rows.end && piece_column < params.out_columns;
          if (is_stored) {
            auto const vector = *reinterpret_cast<uint4 const*>(
                staged + in_staged * kRowBytes + (thread % kPieces ^ in_staged % 8) * 16);
            *reinterpret_cast<uint4*>(params.out + int64_t(row) * params.out_columns +
                                      piece_column) = vector;
          }
        }
        buffer ^= 1;
      }
    }
  }

  /// Writes what a warp has of 16 rows: 16 columns each. A matrix of the instruction is 8 rows of 8
  /// columns, transposed on its way; lane l has the address of row l % 8 of matrix l / 8.
  CUTLASS_DEVICE static void stage_16_rows(uint8_t* rows, int32_t thread,
                                           uint32_t const (&of_atoms)[4]) {
    int32_t const lane = thread % 32;
    int32_t const row = lane / 16 * 8 + lane % 8;
    int32_t const piece = thread / 32 * 2 + lane / 8 % 2;
    auto const at =
        uint32_t(__cvta_generic_to_shared(rows + row * kRowBytes + (piece ^ row % 8) * 16));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(of_atoms[0]), "r"(of_atoms[1]), "r"(of_atoms[2]), "r"(of_atoms[3])
                 : "memory");
  }

  /// Writes zeros behind the last expert's rows, those warps that multiply of all CTAs together.
  CUTLASS_DEVICE static void clear_rest(Params const& params) {
    constexpr int kAtOnce = kThreads - kFirstMultiplyingWarp * cutlass::NumThreadsPerWarp;
    int32_t const last =
        max_of(0, min_of(__ldg(params.offsets + params.order.experts), params.order.rows));
    int64_t const end = int64_t(params.order.rows) * params.out_columns / kAlignment;
    int64_t const begin = int64_t(last) * params.out_columns / kAlignment;
    int64_t const thread =
        int64_t(blockIdx.x) * kAtOnce + int32_t(threadIdx.x) - (kThreads - kAtOnce);
    for (int64_t i = begin + thread; i < end; i += int64_t(gridDim.x) * kAtOnce) {
      reinterpret_cast<uint4*>(params.out)[i] = uint4{};
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    grouped_kernel(CUTLASS_GRID_CONSTANT typename Kernel::Params const params) {
  extern __shared__ char grouped_memory[];
  Kernel::run(params, grouped_memory);
}

}  // namespace agmm
