// The producer warp's loop over the k tiles of a tile, one of whose operands arrives while it runs.
#pragma once

#include "cutlass/cutlass.h"

namespace agmm {

/// `Gate`: says which k tiles may be loaded (ChunkGate). `AcquireAndIssueB`, called with a stage
/// and a k tile: takes the stage and issues the load of the operand that is there. `IssueA`: issues
/// the load of the one that arrives, into the same stage. `kLeads`: B's next tile may be sent for
/// while the other's is awaited.
template <class Gate, class AcquireAndIssueB, class IssueA, bool kLeads>
struct ProducerLoop {
  Gate& gate;
  AcquireAndIssueB const& acquire_and_issue_b;
  IssueA const& issue_a;

  /// All lanes of a warp call it, of which one `issues`; `stage` is that lane's place in the
  /// pipeline, and stands behind the last k tile afterwards. `found(is_first)`: the gate has let
  /// more k tiles through.
  ///
  /// All lanes look at signals together; in between one alone issues all that has arrived. If that
  /// is nothing it sends for B's next tile, once, where it may.
  template <class Stage, class Found>
  CUTLASS_DEVICE void operator()(Stage& stage, int k_begin, bool issues, Found const& found) const {
    int k_tile = k_begin;
    bool has_stage = false;
    bool b_ahead = false;
    CUTLASS_PRAGMA_NO_UNROLL
    for (;;) {
      int const k_end = gate.k_end();
      if (issues) {
        if (has_stage && k_tile < k_end) {
          issue_a(stage, k_tile);
          has_stage = false;
          ++k_tile;
          ++stage;
        }
        int const b_end = b_ahead && !has_stage ? k_end + 1 : k_end;
        CUTLASS_PRAGMA_NO_UNROLL
        for (; k_tile < b_end; ++k_tile, ++stage) {
          acquire_and_issue_b(stage, k_tile);
          has_stage = k_tile == k_end;
          if (has_stage) break;
          issue_a(stage, k_tile);
        }
      }
      __syncwarp();
      if (k_end == gate.k_stop()) break;
      b_ahead = !gate.look(b_ahead || !kLeads);
      if (!b_ahead) found(k_tile == k_begin);
    }
  }
};

}  // namespace agmm
