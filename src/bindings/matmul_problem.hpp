// A matmul as Python describes it, without its tensors.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "agmm/async_input_mm.hpp"
#include "bindings/formats.hpp"

namespace agmm {

// The tuple holds M, N and K.
using SizeTuple = std::tuple<int, int, int>;

// The tuple holds the chunks of rows, the chunks of columns and the chunk computed first.
using ChunksTuple = std::tuple<int, int, int>;

/// A matmul without the addresses of its tensors.
struct MatmulProblem {
  AsyncInputArgs args;

  MatmulProblem(SizeTuple const& size, const BTuple& b, const Format& format,
                const KernelConfig& config, const ChunksTuple& chunks, int rank, int sm_count,
                const std::string& activation, int64_t up_leading, bool quantizes) {
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
    args.arrival = {nullptr, 1, chunks_m, chunks_k, pivot, {}};
    args.arrival.senders.chunks_per_rank = 0;
    args.rank = rank;
    args.sm_count = sm_count;
  }

  std::string str() const {
    return "MatmulProblem(" + args.problem.str() + ", chunks " +
           std::to_string(args.arrival.chunks_m) + "x" + std::to_string(args.arrival.chunks_k) +
           " from " + std::to_string(args.arrival.pivot) + ", " + in_words(args.config) + ")";
  }
};

}  // namespace agmm
