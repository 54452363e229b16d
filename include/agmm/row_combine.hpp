// The sums of the rows that the ranks' experts have computed for each token, made by the ranks that
// hold the tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "agmm/collectives.hpp"
#include "agmm/grouped_matmul.hpp"
#include "agmm/limits.hpp"

namespace agmm {

/// out[token] = the sum over the ranks, in their order, of the sum over the token's choices that a
/// rank has rows of, in their order, of the choice's weight times its row. Sums are made in float32
/// and rounded once. Pointers are device memory, those of rows and out aligned to 16 bytes. Where
/// the rows are is read by the device alone; wrong numbers give wrong results, but touch no other
/// memory.
struct RowCombine {
  CollectiveElement element = CollectiveElement::BFloat16;  // not Byte
  std::vector<int32_t> counts;          // the tokens of each rank, alike on all ranks
  int32_t columns = 0;                  // of a row, 16 bytes or a multiple
  int32_t choices = 0;                  // of a token, up to kMostChoices
  int32_t parts = 1;                    // how many rows are added for each choice, in float32
  int32_t experts = 0;                  // of this rank
  int32_t capacity = 0;                 // the rows of a part
  int32_t const* offsets = nullptr;     // [experts + 1]: the last one is the number of rows
  int32_t const* positions = nullptr;   // [tokens of all ranks, choices]: see RowDispatch
  std::vector<void const*> rows;        // each part's; empty where matmuls compute them
  float const* weights = nullptr;       // [tokens of this rank, choices], or null for 1
  void* out = nullptr;                  // [tokens of this rank, columns]
  uint64_t limit_ns = kDefaultLimitNs;  // of each wait; past it the process ends
};

/// The most rows that are added for each choice.
constexpr int32_t kMostCombinedParts = 4;

/// Combines of one workspace: symmetric memory of a group of ranks. Safe to call from several
/// threads; calls run one after the other, in the same order on all ranks.
class RowCombiner {
 public:
  /// Makes the combines of 2 to 8 ranks on their workspaces; the arguments are those of
  /// FusedAllGatherMatmul's constructor. The words from words_offset on have to be 0, those of
  /// credit_words 1.
  RowCombiner(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes,
              int reserved_sms = 0);
  ~RowCombiner();
  RowCombiner(RowCombiner const&) = delete;
  RowCombiner& operator=(RowCombiner const&) = delete;

  std::size_t slot_bytes() const;

  /// Enqueues the matmuls that compute the rows, one for each part, whose `out` and `sm_count` are
  /// set here, and behind them the combine. Returns whether the stream is being captured into a
  /// graph. Throws std::invalid_argument, with nothing enqueued, where the call makes no sense.
  bool operator()(RowCombine const& call, std::vector<GroupedMatmul> const& matmuls, void* stream);

  /// Does what Collectives::precede does.
  void precede(void* stream);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace agmm
