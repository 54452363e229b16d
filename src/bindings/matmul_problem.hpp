// A matmul as Python describes it, without its tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "agmm/async_input_mm.hpp"
#include "bindings/formats.hpp"

namespace agmm {

// The tuple holds M, N and K.
using SizeTuple = std::tuple<int, int, int>;

// The tuple holds the chunks of rows, the chunks of columns and the chunk computed first.
using ChunksTuple = std::tuple<int, int, int>;

// The tuple holds a weight's columns and leading dimension, and the strides of its block scales.
using MoreTuple = std::tuple<int, int64_t, int, int>;

/// A matmul without the addresses of its tensors.
struct MatmulProblem {
  AsyncInputArgs args;

  MatmulProblem(SizeTuple const& size, const BTuple& b, const Format& format,
                const KernelConfig& config, const ChunksTuple& chunks, int rank, int sm_count,
                const std::string& activation, int64_t up_leading, bool quantizes,
                const std::vector<MoreTuple>& more) {
    const auto& [m, n, k] = size;
    const auto& [chunks_m, chunks_k, pivot] = chunks;
    const NamedEpilogue named(activation, quantizes);
    args.problem = {m,
                    named.columns_of_b(n),
                    k,
                    format.dtype,
                    layout(b.first),
                    format.accumulation,
                    named.epilogue,
                    named.activation};
    args.operands.ldb_up = up_leading;
    args.config = config;
    args.operands.ldb = b.second;
    args.operands.scales = format.scale_layout();
    add_more(more);
    args.arrival = {nullptr, 1, chunks_m, chunks_k, pivot, {}};
    args.arrival.senders.chunks_per_rank = 0;
    args.rank = rank;
    args.sm_count = sm_count;
  }

  /// Adds the weights beside the first, of which `problem.n` counts the columns too.
  void add_more(std::vector<MoreTuple> const& more) {
    if (more.size() >= std::size_t(kMostStreamedWeights)) {
      throw std::invalid_argument("more: found " + std::to_string(more.size()) +
                                  " weights, wanted at most " +
                                  std::to_string(kMostStreamedWeights - 1));
    }
    for (const auto& [columns, leading, k_stride, n_stride] : more) {
      MoreWeight& weight = args.operands.more[args.operands.more_count++];
      weight.n = columns;
      weight.ldb = leading;
      weight.scale_k_stride = k_stride;
      weight.scale_n_stride = n_stride;
      if (columns < 0 || args.problem.n > kMaxSize - columns) {
        throw std::invalid_argument("more: found N=" + std::to_string(columns) +
                                    ", wanted all N together at most " + std::to_string(kMaxSize));
      }
      args.problem.n += columns;
    }
  }

  std::string str() const {
    return "MatmulProblem(" + args.problem.str() + ", chunks " +
           std::to_string(args.arrival.chunks_m) + "x" + std::to_string(args.arrival.chunks_k) +
           " from " + std::to_string(args.arrival.pivot) + ", " + in_words(args.config) + ")";
  }
};

}  // namespace agmm
