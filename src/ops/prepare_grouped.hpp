// A grouped matmul whose checks are done, so that its launch can follow another one at once.
#pragma once

#include <memory>

#include "agmm/grouped_matmul.hpp"

namespace agmm {

struct PreparedGrouped {
  std::shared_ptr<void> params;  // of the kernel
  int (*launcher)(void* params, void* stream) = nullptr;

  /// Throws std::runtime_error when CUDA refuses.
  void launch(void* stream) const;
};

/// Does all of grouped_matmul() but its launch, and throws what that throws.
PreparedGrouped prepare_grouped(GroupedMatmul const& args);

}  // namespace agmm
