#include "ops/registry.hpp"

#include <mutex>
#include <string>

#include "ops/refuse.hpp"

namespace agmm {

std::string KernelKey::str() const {
  return std::string(to_string(op)) + " " + shape.str() + " " + to_string(dtype) + " B " +
         to_string(b_layout) + " " + to_string(accumulation) + " " + to_string(epilogue) + " for " +
         std::string(architecture);
}

KernelKey key_of(KernelFacts const& facts) {
  return {facts.architecture, facts.op,       facts.dtype, facts.accumulation,
          facts.b_layout,     facts.epilogue, facts.shape};
}

void KernelRegistry::add(KernelEntry const& entry) {
  KernelFacts facts = entry.facts;
  facts.op = Op::AllGatherMatmul;
  add({facts, &entry, nullptr, nullptr});
}

void KernelRegistry::add(Op op, ScatterEntry const& entry) {
  if (op == Op::AllGatherMatmul || op == Op::GroupedMatmul) {
    refuse("op", to_string(op), "one whose kernels send tiles");
  }
  KernelFacts facts = entry.facts;
  facts.op = op;
  add({facts, nullptr, &entry, nullptr});
}

void KernelRegistry::add(GroupedEntry const& entry) {
  KernelFacts facts = entry.facts;
  facts.op = Op::GroupedMatmul;
  add({facts, nullptr, nullptr, &entry});
}

void KernelRegistry::add(Kernel const& kernel) {
  std::lock_guard<std::shared_mutex> const lock(mutex_);
  KernelKey const key = key_of(kernel.facts);
  if (by_key_.count(key) != 0) refuse("kernel", "a second " + key.str(), "one");
  by_key_.emplace(key, kernels_.emplace_back(std::make_unique<Kernel const>(kernel)).get());
}

KernelRegistry::Kernel const* KernelRegistry::find(KernelKey const& key) const {
  std::shared_lock<std::shared_mutex> const lock(mutex_);
  auto const found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : found->second;
}

KernelEntry const* KernelRegistry::find_matmul(KernelKey const& key) const {
  Kernel const* const found = find(key);
  return found == nullptr ? nullptr : found->matmul;
}

ScatterEntry const* KernelRegistry::find_scatter(KernelKey const& key) const {
  Kernel const* const found = find(key);
  return found == nullptr ? nullptr : found->scatter;
}

GroupedEntry const* KernelRegistry::find_grouped(KernelKey const& key) const {
  Kernel const* const found = find(key);
  return found == nullptr ? nullptr : found->grouped;
}

std::vector<KernelFacts> KernelRegistry::facts() const {
  std::shared_lock<std::shared_mutex> const lock(mutex_);
  std::vector<KernelFacts> all;
  for (auto const& kernel : kernels_) all.push_back(kernel->facts);
  return all;
}

std::vector<KernelEntry const*> KernelRegistry::matmuls(std::string_view architecture) const {
  std::shared_lock<std::shared_mutex> const lock(mutex_);
  std::vector<KernelEntry const*> found;
  for (auto const& kernel : kernels_) {
    if (kernel->matmul != nullptr && kernel->facts.architecture == architecture) {
      found.push_back(kernel->matmul);
    }
  }
  return found;
}

std::vector<ScatterEntry const*> KernelRegistry::scatters(std::string_view architecture) const {
  std::shared_lock<std::shared_mutex> const lock(mutex_);
  std::vector<ScatterEntry const*> found;
  for (auto const& kernel : kernels_) {
    if (kernel->scatter != nullptr && kernel->facts.architecture == architecture) {
      found.push_back(kernel->scatter);
    }
  }
  return found;
}

KernelRegistry& kernel_registry() {
  // The registry is never destroyed, since calls of other threads may outlast static objects.
  static KernelRegistry* const registry = [] {
    auto* const made = new KernelRegistry();
    for (std::size_t i = 0; i < kKernelCount; ++i) made->add(*kKernelTable[i]);
    for (std::size_t i = 0; i < kScatterCount; ++i) {
      made->add(Op::MatmulReduceScatter, *kScatterTable[i]);
    }
    for (std::size_t i = 0; i < kLaggedCount; ++i) {
      made->add(Op::MatmulAllReduce, *kLaggedTable[i]);
    }
    for (std::size_t i = 0; i < kGroupedCount; ++i) made->add(*kGroupedTable[i]);
    return made;
  }();
  return *registry;
}

std::vector<KernelFacts> built_kernels() { return kernel_registry().facts(); }

}  // namespace agmm
