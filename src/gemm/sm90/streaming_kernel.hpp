// The matmul of few rows: B passes through shared memory at the rate at which memory gives it.
//
// With few rows nothing but the bytes of B takes time. So all CTAs read equal shares of it
// (order/streaming.hpp), each has as much of it on its way as its shared memory holds, and nothing
// that is awaited stands before the first load:
//   warp 4       makes the barriers and loads B, stage after stage, whatever becomes of A
//   warp 5       awaits the kernel ahead and the signals of A's chunks, and loads A
//   warps 0 to 3 multiply: wgmma with 64 columns of out as its rows, and rows of out as its columns
// A cluster is kClusterN tiles side by side, which share the loads of A, times the splits of K,
// whose CTAs send each other their sums.
//
// The ring. Stage i of kStages has `full` (2 arrivals: of warps 4 and 5, each of which expects the
// bytes that it loads, and A's bytes, from all CTAs that share them; with scales of blocks 32 more,
// of warp 5's lanes, which copy them) and `empty` (4 arrivals, one of each warp that multiplies, in
// each CTA that shares the loads of A). All warps go through the same tiles and k tiles, so each
// counts the uses of a stage for itself, and use u of it is phase u of both barriers.
//   1. Warps 4 and 5 write to a stage for use u behind phase u - 1 of `empty`: all that read use
//      u - 1 have, in all CTAs to which warp 5 sends. Phase u of `full` has not ended then in any
//      of them, since each wants an arrival of its own warp 5, which comes behind the same wait. So
//      bytes that another CTA sends early are counted in their phase, though its barrier may not
//      have been told to expect them yet.
//   2. A warp that multiplies arrives at `empty` when its wgmmas have ended, which read the stage,
//      and when its lanes have read the scales.
//   3. Warp 5 ends behind the last phases of `empty`: then all of A has landed, here and in the
//      CTAs to which it was sent, and no other CTA will arrive at a barrier of this one's ring. It
//      is the warp that says that A has been read (sync/release.hpp).
//
// The sums. Row r of a tile belongs to split r % splits, its owner. Each CTA writes its sums of a
// row to the owner's memory, at the place of its own split; the owner adds them up in the order of
// the splits. Where K is split, sums go by stores that complete their bytes at the owner's
// `sums_full`, so no CTA waits until its stores have arrived; one thread of the owner arrives there
// (1 arrival), expecting the bytes of all splits. Where it is not, `sums_full` has the arrivals of
// the 4 warps that have written. `sums_empty` (4 arrivals of each split) says that all owners have
// read a tile's sums, and is awaited before the next tile's are written: so bytes of a tile count
// in their own phase of `sums_full`, though it may not have been told to expect them yet. An
// arrival at `sums_empty` releases nothing, since what follows it in the other CTAs is writes to
// what this one has read. The last tile's sums have nobody who waits for them to be read, and no
// CTA arrives for them: so none arrives at one that may have ended. What is sent to a CTA before is
// what it waits for itself.
//
// Bits. The sum of a row goes through K in steps of 16 within a split (fp8: 32; where sums are
// promoted each stage is summed anew and added, times its scales), then through the splits. No step
// depends on the other rows, on the tile or on when a CTA runs, and the splits on the size of
// B alone (streaming_splits); of several weights in one launch, on the columns of all.
//
// Programmatic launch (kernel_instance.cuh has the invariant: griddepcontrol.wait stands before the
// first access to memory that a kernel writes or reads). Of this kernel's threads
//   - warp 5 executes it before it looks at a signal, loads A, or releases anything;
//   - the warps that multiply do before they read the bias and write out;
//   - warp 4 does before it loads B, but where Params::weight_is_ahead. Then the caller has
//     promised that no kernel writes B which may still run when this one starts: neither the kernel
//     ahead, nor, where that one lets this one start before its own wait, those before it. Of a
//     kernel behind the op's own gather (CallSpec::is_behind_gather) this holds without a promise:
//     the gather writes A alone, and starts when all before it have ended. It lets this one start
//     when all of its own CTAs have, so none of them is in want of a place; what it awaits is sent
//     by other GPUs, as with every kernel that awaits signals on all multiprocessors.
// Every CTA has these warps, and each takes its wait on every path; so a kernel behind this one
// that waits for its end finds the kernels ahead of it ended too. Where nothing here is awaited
// from other kernels but the one ahead, CTAs of the next kernel may take the places that this one
// leaves (launch_dependents); a kernel that awaits signals never lets them, since what is to write
// these may need the places.
//
// Shared memory has no conflicts of banks. TMA writes, and wgmma reads, in the pattern of 128-byte
// swizzles, where the 16-byte pieces of 8 neighbouring rows lie in different banks. A warp writes
// its sums to 4 rows of out, 2 rows apart, and 8 columns of each: with a pitch of 4 more floats
// than the tile has columns they begin 8 banks apart.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "gemm/sm90/chunk_gate.hpp"
#include "gemm/sm90/element_types.hpp"
#include "gemm/sm90/epilogue_policy.hpp"
#include "gemm/sm90/packed_weight.hpp"
#include "gemm/sm90/streamed_sum.hpp"
#include "gemm/sm90/streaming_scales.hpp"
#include "gemm/sm90/wgmma.hpp"
#include "order/streaming.hpp"
#include "sync/bulk_copy.hpp"
#include "sync/device_release.hpp"
#include "sync/device_wait.hpp"
#include "sync/mbarrier.hpp"
#include "sync/named_barrier.hpp"
#include "sync/tensor_load.hpp"
#include "testing/fault.hpp"
#include "testing/stress_delay.hpp"

namespace agmm {

/// What stands in place of parameters that a kernel has no use for.
struct NoParams {};

/// kTileM rows and kTileN columns of B are a CTA's tile; with a gate half of them are gate's, the
/// others up's. kMostWeights: of so many weights a launch computes the products with A at most.
/// Sink_ says what becomes of the tiles (gemm/sm90/streamed_sum.hpp).
template <class Element_, BLayout kBLayout, int kTileM_, int kTileN_, int kClusterN,
          Accumulation kAccumulation, Epilogue kEpilogue, int kMostWeights,
          class Sink_ = StoredTiles>
struct StreamingKernel {
  using Types = TypesOf<Element_>;
  using ElementA = typename Types::A;
  using ElementB = typename Types::B;
  using Element = typename Types::Out;
  using Sink = Sink_;
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static_assert(sizeof(ElementA) == sizeof(ElementB));
  static constexpr bool kIsPacked = Types::kPackedGroups != 0;
  using Packed = PackedAtom<kIsPacked ? Types::kPackedGroups : 1>;
  static constexpr bool kPromotes = kAccumulation != Accumulation::Fast;
  static constexpr bool kScalesBlocks = is_block_scaled(kAccumulation);
  static constexpr bool kScalesColumns = kAccumulation == Accumulation::Block1x128;
  using Policy = EpiloguePolicy<kEpilogue, Element, Types::kIsFp8 && !kScalesBlocks>;
  static_assert(!Types::kIsFp8 || columns_per_out(kEpilogue) == 1);
  static_assert(!Sink::kSends ||
                (kMostWeights == 1 && kEpilogue == Epilogue::Bias && !Types::kIsFp8 && !kIsPacked));
  static constexpr int kThreads = 192;
  static constexpr int kWeightWarp = 4;  // the next one is A's
  static constexpr int kMultiplyingWarps = 4;
  static constexpr int kSharedBytes = 227 * 1024;  // that a CTA may have

  /// A slab is the box of a TMA load: 128 bytes of K wide (where B is row-major: of columns).
  static constexpr int kRowBytes = 128;
  static constexpr int kSlabColumns = kRowBytes / int(sizeof(ElementA));
  static constexpr int kSlabs = kStreamedK / kSlabColumns;
  static constexpr int kAtoms = kTileN / kStreamedColumns;
  static constexpr int kAtomBytes = kStreamedColumns * kRowBytes;  // of one slab
  static constexpr int kWeightBytes =
      kIsPacked ? kAtoms * Packed::kBytes : kSlabs * kAtoms * kAtomBytes;
  static_assert(!kIsPacked || (kAtoms == 1 && kClusterN == 1));
  static constexpr int kSlabBytesOfA = kTileM * kRowBytes;
  static constexpr int kBytesOfA = kSlabs * kSlabBytesOfA;
  static_assert(kTileM % 8 == 0 && kTileN % kStreamedColumns == 0);
  static_assert(kClusterN == 1 || kClusterN == kSlabs, "each CTA loads one slab of A for all");

  static constexpr int kMaxSplits = kMaxStreamingCluster / kClusterN;
  static constexpr int kSumPitch = kTileN + 4;
  static constexpr int kSumFloats = (kTileM + kMaxSplits - 1) * kSumPitch;  // of all splits' rows
  static constexpr int kOtherBytes = 320;  // barriers of 16 stages, and the like
  using HeldScales = StageScales<kTileM, kTileN, kScalesColumns>;
  static constexpr int kScaleStageBytes = kScalesBlocks ? int(sizeof(HeldScales)) : 0;
  static constexpr int kStages =
      min_of((kSharedBytes - kSumFloats * int(sizeof(float)) - kOtherBytes) /
                 (kWeightBytes + kBytesOfA + kScaleStageBytes),
             16);
  static_assert(kStages >= 3);

  struct Shared {
    alignas(1024) uint8_t weight[kStages][kWeightBytes];
    alignas(1024) uint8_t a[kStages][kBytesOfA];
    alignas(16) float sums[kSumFloats];
    alignas(16) HeldScales scales[kScalesBlocks ? kStages : 1];
    uint64_t full[kStages];
    uint64_t empty[kStages];
    uint64_t sums_full;
    uint64_t sums_empty;
    uint32_t seen;    // of ChunkGate
    int32_t claimed;  // of NormedRows
  };
  static_assert(sizeof(Shared) <= kSharedBytes);
  static_assert(!Sink::kSends ||
                streamed_norm_bytes(kMaxStreamedNormColumns) <= kStages * kWeightBytes);
  /// With a gate a tile has columns of two weights, of each as many.
  static constexpr int kHalves = Policy::kColumnsPerOut;
  static constexpr bool kIsGated = kHalves == 2;
  static constexpr int kOutColumns = kTileN / kHalves;  // of a tile
  static_assert(kOutColumns % kStreamedColumns == 0 && (!kIsGated || kClusterN == 1));

  /// One of the weights, with what becomes of its products.
  struct Weight {
    std::conditional_t<kIsPacked, uint8_t const*, CUtensorMap> map;  // packed: the atoms
    std::conditional_t<kIsGated, CUtensorMap, NoParams> up;
    typename Policy::Args epilogue{};
    std::conditional_t<kScalesBlocks, BlockScaleArgs, NoParams> block_scales{};
    Element* out = nullptr;
    int32_t n = 0;            // the columns of out
    int32_t first_block = 0;  // of its columns, in those of all weights
  };

  struct Params {
    Weight weights[kMostWeights];
    CUtensorMap a;
    CUtensorMap a_local;
    CUtensorMap last_rows;  // of A or A_local, where tiles do not divide M
    ChunkArrival arrival{};
    Range local_rows{};  // these rows are read from A_local and need no signal
    Release release{};
    int32_t weight_count = 1;
    int32_t m = 0;
    int32_t k_tiles = 0;  // of kStreamedK columns of A
    FastDiv splits{};
    FastDiv tiles_m{};
    int32_t blocks = 0;    // of a cluster
    int32_t clusters = 0;  // of the launch
    bool starts_early = false;
    bool weight_is_ahead = false;
    bool lets_next_start = false;
    typename Sink::Args sink{};

    CUTLASS_HOST_DEVICE int32_t cluster_ctas() const { return kClusterN * splits.divisor; }
    int32_t ctas() const { return clusters * cluster_ctas(); }
  };

  CUTLASS_DEVICE static void run(Params const& params, char* memory) {
    auto& shared = *reinterpret_cast<Shared*>(memory);
    Place const place(params);
    int const warp = cutlass::canonical_warp_idx_sync();
    if (warp < kMultiplyingWarps) {
      multiply(params, shared, place);
    } else if (warp == kWeightWarp) {
      load_weight(params, shared, place);
    } else {
      load_a(params, shared, place);
    }
  }

 private:
  friend Sink;

  /// What a CTA has to do.
  struct Place {
    int32_t cluster;
    int32_t beside;  // the tile's number among those of its cluster
    int32_t split;
    Range k_tiles;

    CUTLASS_DEVICE explicit Place(Params const& params) {
      int32_t const of_tile = int32_t(blockIdx.x) / kClusterN;
      beside = int32_t(blockIdx.x) % kClusterN;
      cluster = params.splits.divide(of_tile);
      split = params.splits.remainder(of_tile);
      k_tiles = {params.splits.divide(split * params.k_tiles),
                 params.splits.divide((split + 1) * params.k_tiles)};
    }
    /// The rank in the cluster of the CTA that has another split of this one's tile.
    CUTLASS_DEVICE int32_t rank_of(int32_t of_split) const { return of_split * kClusterN + beside; }
    /// The rank of a CTA with this one's split.
    CUTLASS_DEVICE int32_t rank_beside(int32_t of_tile) const {
      return split * kClusterN + of_tile;
    }
  };

  struct Tile {
    Range rows;
    int32_t weight = 0;
    int32_t column;  // of the weight's part of out

    CUTLASS_DEVICE Tile(Params const& params, Place const& place, int32_t block) {
      int32_t const begin = params.tiles_m.remainder(block) * kTileM;
      rows = {begin, min_of(begin + kTileM, params.m)};
      int32_t of_columns = params.tiles_m.divide(block);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 1; i < kMostWeights; ++i) {
        if (i < params.weight_count && of_columns >= params.weights[i].first_block) weight = i;
      }
      if constexpr (kMostWeights > 1) of_columns -= params.weights[weight].first_block;
      column = (of_columns * kClusterN + place.beside) * kOutColumns;
    }
  };

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
  };

  /// The arrivals that fill a stage: two warps', and with scales of blocks those of the lanes that
  /// copy them.
  static constexpr int kArrivals = 2 + (kScalesBlocks ? cutlass::NumThreadsPerWarp : 0);

  CUTLASS_DEVICE static bool is_split(Params const& params) { return params.splits.divisor > 1; }

  /// One lane makes them, since the machine takes lanes' barriers one after the other in a loop.
  CUTLASS_DEVICE static void make_barriers(Params const& params, Shared& shared) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], kArrivals);
      mbarrier_init(&shared.empty[i], kMultiplyingWarps * kClusterN);
    }
    mbarrier_init(&shared.sums_full, is_split(params) ? 1 : kMultiplyingWarps);
    mbarrier_init(&shared.sums_empty, kMultiplyingWarps * params.splits.divisor);
    fence_mbarriers_made();
    fence_proxy_async_shared();  // the first loads complete at them, behind no barrier
  }

  CUTLASS_DEVICE static bool has_cluster(Params const& params) {
    return params.cluster_ctas() != 1;
  }

  /// Warp 4 says so and loads at once, while the others await it, in all CTAs of the cluster. In a
  /// launch without one, the compiler's barrier of a cluster is no barrier of two halves: nothing
  /// comes of an arrival, and a wait is __syncthreads(). Warp 4 would be waited for until its last
  /// load, for which it needs stages that nobody gives back meanwhile.
  CUTLASS_DEVICE static void say_barriers_are_made(Params const& params) {
    if (has_cluster(params)) {
      cluster_arrive();
    } else {
      named_barrier_arrive<NamedBarrier::kStarted, kThreads>();
    }
  }

  CUTLASS_DEVICE static void await_barriers(Params const& params) {
    if (has_cluster(params)) {
      cluster_wait();
    } else {
      named_barrier_sync<NamedBarrier::kStarted, kThreads>();
    }
  }

  CUTLASS_DEVICE static void load_weight(Params const& params, Shared& shared, Place const& place) {
    bool const issues = lane_id() == 0;
    if (issues) {
      Weight const& first = params.weights[Tile(params, place, place.cluster).weight];
      if constexpr (!kIsPacked) prefetch_descriptor(&first.map);
      if constexpr (kIsGated) prefetch_descriptor(&first.up);
      make_barriers(params, shared);
    }
    __syncwarp();
    say_barriers_are_made(params);
    if (params.lets_next_start) let_next_kernel_start();
    if (!params.weight_is_ahead) wait_for_previous_kernel();
    stress_delay_warp(params.arrival.wait_limit.rank);
    if (issues) {
      uint64_t const policy = evict_first_policy();
      Stage stage;
      for (int32_t block = place.cluster; block < params.blocks; block += params.clusters) {
        Tile const tile(params, place, block);
        Weight const& weight = params.weights[tile.weight];
        CUTLASS_PRAGMA_NO_UNROLL
        for (int32_t k = place.k_tiles.begin; k < place.k_tiles.end; ++k, stage.advance()) {
          uint64_t* const full = &shared.full[stage.index];
          mbarrier_wait(&shared.empty[stage.index], stage.phase ^ 1);
          mbarrier_arrive_expecting(full, kWeightBytes);
          uint8_t* const to = shared.weight[stage.index];
          if constexpr (kIsPacked) {
            // All K of 64 columns lie together, atom behind atom.
            int64_t const atom = int64_t(tile.column / kStreamedColumns) * params.k_tiles + k;
            bulk_load(to, weight.map + atom * Packed::kBytes, Packed::kBytes, full, policy);
          } else {
            load_stage_of_weight(weight, to, tile.column, k, full, policy);
          }
        }
      }
    }
    __syncwarp();
    if (has_cluster(params)) cluster_wait();  // each phase of its barrier has a wait of all threads
  }

  CUTLASS_DEVICE static void load_stage_of_weight(Weight const& weight, uint8_t* to, int32_t column,
                                                  int32_t k, uint64_t* full, uint64_t policy) {
    constexpr int kAtomsOfHalf = kAtoms / kHalves;
    CUTLASS_PRAGMA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      int32_t const depth = k * kStreamedK + slab * kSlabColumns;
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        CUtensorMap const* map = &weight.map;
        if constexpr (kIsGated) map = half == 0 ? &weight.map : &weight.up;
        uint8_t* const at = to + (slab * kAtoms + half * kAtomsOfHalf) * kAtomBytes;
        if constexpr (kBLayout == BLayout::ColumnMajor) {
          tensor_load(at, map, depth, column, full, policy);
        } else {
          CUTLASS_PRAGMA_UNROLL
          for (int atom = 0; atom < kAtomsOfHalf; ++atom) {
            tensor_load(at + atom * kAtomBytes, map, column + atom * kStreamedColumns, depth, full,
                        policy);
          }
        }
      }
    }
  }

  CUTLASS_DEVICE static void load_a(Params const& params, Shared& shared, Place const& place) {
    if (has_cluster(params)) cluster_arrive();
    bool const issues = lane_id() == 0;
    wait_for_previous_kernel();
    uint32_t const seen = first_look(params.arrival);
    if (issues) shared.seen = seen;
    __syncwarp();
    fence_proxy_async_global();
    await_barriers(params);
    Stage stage;
    load_rows(params, shared, place, stage);
    __syncwarp();
    if (issues) {
      // A stage that was never used has nobody to wait for, as at the start.
      for (int32_t i = 0; i < kStages; ++i, stage.advance()) {
        mbarrier_wait(&shared.empty[stage.index], stage.phase ^ 1);
      }
    }
    __syncwarp();
    finish(params.release, int32_t(gridDim.x), params.arrival.wait_limit);
  }

  CUTLASS_DEVICE static CUtensorMap const* descriptor_of(Params const& params, Range const& rows) {
    return rows.size() < kTileM               ? &params.last_rows
           : params.local_rows.contains(rows) ? &params.a_local
                                              : &params.a;
  }

  /// Loads A stage after stage, behind the gate of its chunks.
  CUTLASS_DEVICE static void load_rows(Params const& params, Shared& shared, Place const& place,
                                       Stage& stage) {
    bool const issues = lane_id() == 0;
    for (int32_t block = place.cluster; block < params.blocks; block += params.clusters) {
      Tile const tile(params, place, block);
      Range const rows = tile.rows;
      bool const is_local = params.local_rows.contains(rows);
      CUtensorMap const* const descriptor = descriptor_of(params, rows);
      int32_t const row = is_local ? rows.begin - params.local_rows.begin : rows.begin;
      ChunkGate<kTileM, kStreamedK, true> gate(params.arrival, shared.seen, rows.begin,
                                               place.k_tiles, is_local);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t k = place.k_tiles.begin; k < place.k_tiles.end; ++k, stage.advance()) {
        while (k >= gate.k_end()) gate.look(true);
        __syncwarp();
        uint64_t* const full = &shared.full[stage.index];
        if constexpr (kScalesBlocks) {
          mbarrier_wait(&shared.empty[stage.index], stage.phase ^ 1);
          shared.scales[stage.index].load(params.weights[tile.weight].block_scales, rows,
                                          tile.column, k, full);
          if (!issues) continue;
        } else {
          if (!issues) continue;
          mbarrier_wait(&shared.empty[stage.index], stage.phase ^ 1);
        }
        mbarrier_arrive_expecting(full, uint32_t(rows.size()) * kRowBytes * kSlabs);
        uint8_t* const to = shared.a[stage.index];
        int32_t const depth = k * kStreamedK;
        if constexpr (kClusterN == 1) {
          CUTLASS_PRAGMA_UNROLL
          for (int slab = 0; slab < kSlabs; ++slab) {
            tensor_load(to + slab * kSlabBytesOfA, descriptor, depth + slab * kSlabColumns, row,
                        full);
          }
        } else {
          constexpr uint32_t kAll = (1u << kClusterN) - 1;
          tensor_load_for(uint16_t(kAll << place.rank_beside(0)), to + place.beside * kSlabBytesOfA,
                          descriptor, depth + place.beside * kSlabColumns, row, full);
        }
      }
      if constexpr (kNoWait) gate.look_too_late();
    }
  }

  using Sums = float[kAtoms][kTileM / 2];

  CUTLASS_DEVICE static void fence(Sums& sums) {
    CUTLASS_PRAGMA_UNROLL
    for (auto& of_atom : sums) {
      CUTLASS_PRAGMA_UNROLL
      for (float& sum : of_atom) cute::warpgroup_fence_operand(sum);
    }
  }

  /// Adds the products of a stage to `sums`, or begins them anew where they are promoted.
  CUTLASS_DEVICE static void multiply_stage(Shared const& shared, int32_t stage, Sums& sums) {
    using cute::GMMA::Major;
    constexpr bool kIsColumnMajor = kBLayout == BLayout::ColumnMajor;
    using Mma = Wgmma<ElementB, ElementA, kTileM, kIsColumnMajor ? Major::K : Major::MN, Major::K>;
    constexpr int kSteps = kSlabColumns / Mma::kDepth;
    constexpr int kStepBytes = Mma::kDepth * int(sizeof(ElementA));
    // A slab of row-major B has 64 rows of K, of 64 columns each.
    constexpr int kStepBytesOfB = kIsColumnMajor ? kStepBytes : Mma::kDepth * kRowBytes;
    fence(sums);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        uint64_t const a =
            wgmma_descriptor(shared.a[stage] + slab * kSlabBytesOfA + step * kStepBytes);
        CUTLASS_PRAGMA_UNROLL
        for (int atom = 0; atom < kAtoms; ++atom) {
          uint64_t const b = wgmma_descriptor(
              shared.weight[stage] + (slab * kAtoms + atom) * kAtomBytes + step * kStepBytesOfB);
          Mma::fma(sums[atom], b, a, kPromotes && slab == 0 && step == 0 ? 0 : 1);
        }
      }
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    fence(sums);
  }

  /// Multiplies a stage of a packed weight. Its groups have sums of their own, which are all under
  /// way before the first is awaited.
  CUTLASS_DEVICE static void add_packed_stage(Shared const& shared, int32_t stage, Sums& sums) {
    constexpr int kGroups = kIsPacked ? Types::kPackedGroups : 1;
    auto const thread = int(threadIdx.x);
    uint8_t const* const atom = shared.weight[stage];
    typename Packed::Values values;
    Packed::read(atom, thread, values);
    float parts[kGroups][kTileM / 2] = {};
    CUTLASS_PRAGMA_UNROLL
    for (auto& four : values) {
      CUTLASS_PRAGMA_UNROLL
      for (uint32_t& two : four) cute::warpgroup_fence_operand(two);
    }
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < Packed::kSteps; ++step) {
      constexpr int kOfSlab = Packed::kSteps / kSlabs;
      uint8_t const* const a = shared.a[stage] + step / kOfSlab * kSlabBytesOfA +
                               step % kOfSlab * 16 * int(sizeof(ElementA));
      wgmma_of_registers<kTileM>(parts[step / Packed::kStepsOfGroup], values[step],
                                 wgmma_descriptor(a), step % Packed::kStepsOfGroup == 0 ? 0 : 1);
    }
    cute::warpgroup_commit_batch();
    float scales[kGroups][2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kGroups; ++i) {
      scales[i / 2][i % 2] = Packed::scale(atom, i / 2, fragment_row(thread) + 8 * (i % 2));
    }
    cute::warpgroup_wait<0>();
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTileM / 2; ++i) {
        cute::warpgroup_fence_operand(parts[group][i]);
        sums[0][i] = fmaf(parts[group][i], scales[group][i / 2 % 2], sums[0][i]);
      }
    }
    __syncwarp();  // one lane gives the stage back for all
  }

  /// Multiplies a stage and adds its products to `sums`: by `part`, times the scales of blocks
  /// where there are any, if sums are promoted.
  CUTLASS_DEVICE static void add_stage(Shared const& shared, int32_t stage, Sums& sums,
                                       Sums& part) {
    if constexpr (kIsPacked) {
      add_packed_stage(shared, stage, sums);
    } else if constexpr (!kPromotes) {
      multiply_stage(shared, stage, sums);
    } else {
      multiply_stage(shared, stage, part);
      if constexpr (kScalesBlocks) {
        StageFactors<kTileM, kTileN, kScalesColumns> const factors(shared.scales[stage]);
        __syncwarp();  // one lane gives the stage back for all
        CUTLASS_PRAGMA_UNROLL
        for (int atom = 0; atom < kAtoms; ++atom) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kTileM / 2; ++i) {
            sums[atom][i] = factors.times(sums[atom][i], part[atom][i], atom, i);
          }
        }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int atom = 0; atom < kAtoms; ++atom) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kTileM / 2; ++i) sums[atom][i] += part[atom][i];
        }
      }
    }
  }

  CUTLASS_DEVICE static void multiply(Params const& params, Shared& shared, Place const& place) {
    if (has_cluster(params)) cluster_arrive();
    await_barriers(params);
    wait_for_previous_kernel();
    typename Sink::template Of<StreamingKernel> sink(params);
    Stage stage;
    uint32_t parity = 0;  // of the tile
    for (int32_t block = place.cluster; block < params.blocks; block += params.clusters) {
      Tile const tile(params, place, block);
      Sums sums{};
      [[maybe_unused]] Sums part{};
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t k = place.k_tiles.begin; k < place.k_tiles.end; ++k, stage.advance()) {
        mbarrier_wait(&shared.full[stage.index], stage.phase);
        add_stage(shared, stage.index, sums, part);
        give_back(shared, place, stage.index);
      }
      if (block != place.cluster) mbarrier_wait_in_cluster(&shared.sums_empty, parity ^ 1);
      if (is_split(params)) {
        if (threadIdx.x == 0) expect_sums(params, shared, place, tile);
        send_sums<true>(params, shared, place, tile, sums);
      } else {
        send_sums<false>(params, shared, place, tile, sums);
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(&shared.sums_full);
      }
      if constexpr (Sink::kSends) sink.look();
      mbarrier_wait_in_cluster(&shared.sums_full, parity);
      if constexpr (Sink::kSends) {
        sink.send(shared, place, tile);
      } else {
        add_up(params, shared, place, tile);
      }
      if (block + params.clusters < params.blocks) say_sums_are_read(params, shared, place);
      parity ^= 1;
    }
    if constexpr (Sink::kSends) sink.take(shared, place);
  }

  /// The rows of a tile that this CTA owns.
  CUTLASS_DEVICE static int32_t own_rows(Params const& params, Place const& place,
                                         Tile const& tile) {
    return params.splits.divide(tile.rows.size() + params.splits.divisor - 1 - place.split);
  }

  /// Gives a stage back for a warp, in each CTA that shares the loads of A. Where none does, the
  /// launch may have no cluster, and the arrival needs no address in one.
  CUTLASS_DEVICE static void give_back(Shared& shared, Place const& place, int32_t stage) {
    if constexpr (kClusterN == 1) {
      if (lane_id() == 0) mbarrier_arrive(&shared.empty[stage]);
    } else if (lane_id() < kClusterN) {
      mbarrier_arrive_in_cluster(&shared.empty[stage], place.rank_beside(lane_id()));
    }
  }

  /// Tells the owner's barrier the bytes that all splits send it.
  CUTLASS_DEVICE static void expect_sums(Params const& params, Shared& shared, Place const& place,
                                         Tile const& tile) {
    int32_t const rows = own_rows(params, place, tile) * params.splits.divisor;
    mbarrier_arrive_expecting(&shared.sums_full, uint32_t(rows) * kTileN * uint32_t(sizeof(float)));
  }

  /// Arrives for a warp that has read its sums, at the barriers of all CTAs that have splits of its
  /// tile.
  CUTLASS_DEVICE static void say_sums_are_read(Params const& params, Shared& shared,
                                               Place const& place) {
    __syncwarp();
    int32_t const split = lane_id();
    if (!is_split(params)) {
      if (split == 0) mbarrier_arrive(&shared.sums_empty);
    } else if (split < params.splits.divisor) {
      mbarrier_arrive_in_cluster(&shared.sums_empty, place.rank_of(split));
    }
  }

  /// Where the owner of a row has its sums of one split; `of_owner`: the row's number among its.
  CUTLASS_DEVICE static int32_t sums_at(Params const& params, int32_t split, int32_t of_owner) {
    return (split * params.splits.divide(kTileM + params.splits.divisor - 1) + of_owner) *
           kSumPitch;
  }

  /// Writes a thread's sums to their owners. kIsSplit: these may be other CTAs.
  template <bool kIsSplit>
  CUTLASS_DEVICE static void send_sums(Params const& params, Shared& shared, Place const& place,
                                       Tile const& tile, Sums const& sums) {
    auto const thread = int32_t(threadIdx.x);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTileM / 4; ++i) {
      int32_t const row = fragment_column(thread) + 8 * (i / 2) + i % 2;
      if (row >= tile.rows.size()) break;
      float* const of_row = shared.sums + sums_at(params, place.split, params.splits.divide(row)) +
                            fragment_row(thread);
      int32_t const owner = kIsSplit ? place.rank_of(params.splits.remainder(row)) : 0;
      uint32_t const to = kIsSplit ? address_in_cluster(of_row, owner) : 0;
      uint32_t const completes = kIsSplit ? address_in_cluster(&shared.sums_full, owner) : 0;
      CUTLASS_PRAGMA_UNROLL
      for (int atom = 0; atom < kAtoms; ++atom) {
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          int const at = atom * kStreamedColumns + 8 * half;
          float const sum = sums[atom][4 * (i / 2) + 2 * half + i % 2];
          if constexpr (kIsSplit) {
            store_and_complete_in_cluster(to + uint32_t(at) * sizeof(float), sum, completes);
          } else {
            of_row[at] = sum;
          }
        }
      }
    }
  }

  /// The sum over the splits of neighbouring columns of a row.
  CUTLASS_DEVICE static Floats<kAlignment> sum_of_splits(Params const& params, Shared const& shared,
                                                         int32_t of_owner, int32_t column) {
    Floats<kAlignment> sum;
    sum.clear();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t split = 0; split < params.splits.divisor; ++split) {
      float const* const from = shared.sums + sums_at(params, split, of_owner) + column;
      auto const parts =
          *reinterpret_cast<cutlass::AlignedArray<float, kAlignment, 16> const*>(from);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kAlignment; ++j) sum[j] = split == 0 ? parts[j] : sum[j] + parts[j];
    }
    return sum;
  }

  /// Adds up this CTA's share of a tile and stores it.
  CUTLASS_DEVICE static void add_up(Params const& params, Shared const& shared, Place const& place,
                                    Tile const& tile) {
    constexpr int kPieces = kOutColumns / kAlignment;  // of a row
    Weight const& weight = params.weights[tile.weight];
    int32_t const splits = params.splits.divisor;
    int32_t const rows = own_rows(params, place, tile);
    for (int32_t i = int32_t(threadIdx.x); i < rows * kPieces;
         i += kMultiplyingWarps * cutlass::NumThreadsPerWarp) {
      int32_t const of_owner = i / kPieces;
      int32_t const in_tile = i % kPieces * kAlignment;
      int32_t const column = tile.column + in_tile;
      if (column >= weight.n) continue;
      int32_t const row = tile.rows.begin + of_owner * splits + place.split;
      auto const sum = sum_of_splits(params, shared, of_owner, in_tile);
      Element* const to = weight.out + int64_t(row) * weight.n + column;
      cutlass::AlignedArray<Element, kAlignment> found;
      if constexpr (kIsGated) {
        auto const up = sum_of_splits(params, shared, of_owner, kOutColumns + in_tile);
        found = gated(weight.epilogue, column, sum, up);
      } else {
        auto const of_row = Policy::row(weight.epilogue, row);
        if constexpr (Policy::kScaled) {
          RowScaleArgs const& scales = weight.epilogue.row_scales;
          if (scales.out != nullptr && column == 0) scales.out[row] = of_row.scale;
        }
        found = Policy::apply(weight.epilogue, of_row, column, sum);
      }
      *reinterpret_cast<cutlass::AlignedArray<Element, kAlignment>*>(to) = found;
    }
  }

  CUTLASS_DEVICE static Floats<kAlignment> with_bias(Floats<kAlignment> const& sums,
                                                     Element const* bias, int32_t column) {
    if (bias == nullptr) return sums;
    auto const added =
        *reinterpret_cast<cutlass::AlignedArray<Element, kAlignment> const*>(bias + column);
    Floats<kAlignment> found;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAlignment; ++i) found[i] = sums[i] + float(added[i]);
    return found;
  }

  /// The columns of out that come of the sums of gate and up.
  CUTLASS_DEVICE static auto gated(typename Policy::Args const& args, int32_t column,
                                   Floats<kAlignment> gate, Floats<kAlignment> up) {
    gate = with_bias(gate, args.bias, column);
    up = with_bias(up, args.bias_up, column);
    cutlass::AlignedArray<Element, kAlignment> out;
    with_activation(args.activation, [&](auto function) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAlignment; ++i) {
        out[i] = Element(Policy::Math::finish(gate[i], up[i], function));
      }
    });
    return out;
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    streaming_kernel(CUTLASS_GRID_CONSTANT typename Kernel::Params const params) {
  extern __shared__ char streaming_memory[];
  Kernel::run(params, streaming_memory);
}

}  // namespace agmm
