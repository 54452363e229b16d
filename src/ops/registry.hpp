// The kernels that this process has, by what they are for. It begins with those of the build and
// can grow.
#pragma once

#include <memory>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "agmm/problem.hpp"
#include "gemm/grouped_entry.hpp"
#include "gemm/kernel_entry.hpp"
#include "gemm/scatter_entry.hpp"
#include "ops/call_fields.hpp"

namespace agmm {

/// What a call asks for: no two kernels have the same.
struct KernelKey {
  std::string_view architecture;
  Op op = Op::AllGatherMatmul;
  DType dtype = DType::BFloat16;
  Accumulation accumulation = Accumulation::Fast;
  BLayout b_layout = BLayout::ColumnMajor;
  Epilogue epilogue = Epilogue::Bias;
  KernelShape shape{};

  std::string str() const;
};
AGMM_FIELDS(KernelKey, architecture, op, dtype, accumulation, b_layout, epilogue, shape);

KernelKey key_of(KernelFacts const& facts);

/// A registry is safe to use from several threads. Its entries live as long as the process.
class KernelRegistry {
 public:
  /// Adds a kernel. One that is added after a workspace was made is loaded at its first call, which
  /// waits for the device, or by load_kernels(). Throws std::invalid_argument where there is one
  /// with the same key, or the entry is not of that op.
  void add(KernelEntry const& entry);
  void add(Op op, ScatterEntry const& entry);
  void add(GroupedEntry const& entry);

  /// Return the kernel with this key, or null where there is none.
  KernelEntry const* find_matmul(KernelKey const& key) const;
  ScatterEntry const* find_scatter(KernelKey const& key) const;
  GroupedEntry const* find_grouped(KernelKey const& key) const;

  /// What the kernels can do, in the order in which they were added.
  std::vector<KernelFacts> facts() const;

  /// All kernels for an architecture: of all-gather + matmul, and of the ops that send tiles.
  std::vector<KernelEntry const*> matmuls(std::string_view architecture) const;
  std::vector<ScatterEntry const*> scatters(std::string_view architecture) const;

 private:
  struct Kernel {
    KernelFacts facts;
    KernelEntry const* matmul;    // of all-gather + matmul
    ScatterEntry const* scatter;  // of the ops that send tiles
    GroupedEntry const* grouped;  // of grouped matmuls
  };
  struct Hash {
    std::size_t operator()(KernelKey const& key) const { return hash_of_fields(key); }
  };
  struct IsSame {
    bool operator()(KernelKey const& a, KernelKey const& b) const { return same_fields(a, b); }
  };

  void add(Kernel const& kernel);
  Kernel const* find(KernelKey const& key) const;

  mutable std::shared_mutex mutex_;
  std::vector<std::unique_ptr<Kernel const>> kernels_;
  std::unordered_map<KernelKey, Kernel const*, Hash, IsSame> by_key_;
};

/// The registry of the process.
KernelRegistry& kernel_registry();

}  // namespace agmm
