// The rows that a rank's experts multiply, brought from the ranks that hold them, and the grouped
// matmuls that take them as they come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "agmm/grouped_matmul.hpp"
#include "agmm/limits.hpp"

namespace agmm {

/// Every rank offers its tokens to the others, and brings each token that its own experts want,
/// once, to all the rows that hold it. Tokens are counted over all ranks, in the order of the
/// ranks. Pointers are device memory, those of rows and tokens aligned to 16 bytes. Which rows
/// there are is read by the device alone; wrong numbers give wrong results, but touch no other
/// memory.
struct RowDispatch {
  void const* x = nullptr;      // this rank's tokens, one behind the other
  int64_t row_bytes = 0;        // a multiple of 16
  std::vector<int32_t> counts;  // the tokens of each rank, alike on all ranks
  int32_t choices = 0;          // of a token, up to kMostChoices
  int32_t experts = 0;          // of this rank, up to kMostExperts
  int32_t capacity = 0;         // the rows that there is room for
  // The rows lie by expert, inside an expert by token.
  int32_t const* tokens = nullptr;      // [capacity]: the token of each row
  int32_t const* offsets = nullptr;     // [experts + 1]: where the rows of each expert begin
  int32_t const* positions = nullptr;   // [tokens of all ranks, choices]: the row of each choice
                                        // whose expert this rank has, else a negative number
  void* rows = nullptr;                 // [capacity]: what lies behind the last row is not written
  void* gathered = nullptr;             // the tokens of all ranks, or null
  uint32_t* arrived = nullptr;          // [ranks * experts]: RowArrival's words
  int32_t* begins = nullptr;            // [experts * ranks]: RowArrival's first rows
  int32_t ctas = 0;                     // that bring rows; 0: as many as usual
  uint64_t limit_ns = kDefaultLimitNs;  // of each wait; past it the process ends
};

/// The most choices of a token: a lane of a warp looks after each.
constexpr int32_t kMostChoices = 32;
/// The CTAs that bring few rows, or rows without a matmul, where the caller says nothing; many rows
/// have fewer or more of them, by the time that their matmul takes. Each has 4 KiB under way for
/// each of its 24 warps, so that 16 have 1.5 MiB, about twice latency times bandwidth of NVLink.
/// The matmul has as many multiprocessors less.
constexpr int32_t kDispatchCtas = 16;

/// Dispatches of one workspace: symmetric memory of a group of ranks. Safe to call from several
/// threads; calls run one after the other, in the same order on all ranks.
class RowDispatcher {
 public:
  /// Bytes of symmetric memory that a workspace needs on every rank. `slot_bytes` is a multiple of
  /// 128, and room for the tokens of the rank that holds most.
  static std::size_t workspace_bytes(std::size_t slot_bytes, int world_size);

  /// Makes the dispatches of 2 to 8 ranks on their workspaces; the arguments are those of
  /// FusedAllGatherMatmul's constructor. All words from words_offset on have to be 0.
  RowDispatcher(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes,
                int reserved_sms = 0);
  ~RowDispatcher();
  RowDispatcher(RowDispatcher const&) = delete;
  RowDispatcher& operator=(RowDispatcher const&) = delete;

  std::size_t slot_bytes() const;

  /// Enqueues the dispatch and behind it the matmuls of its rows, of which the first one takes the
  /// rows as they come. `a`, `lda`, `offsets`, `arrival` and `sm_count` of the matmuls are set
  /// here. Returns whether the stream is being captured into a graph. Throws std::invalid_argument,
  /// with nothing enqueued, where the call makes no sense.
  bool operator()(RowDispatch const& call, std::vector<GroupedMatmul> const& matmuls, void* stream);

  /// Does what Collectives::precede does.
  void precede(void* stream);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace agmm
