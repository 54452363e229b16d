// The fields of the structs that describe a call, for its equality and hash.
#pragma once

#include "agmm/async_input_mm.hpp"
#include "ops/fields.hpp"

namespace agmm {

AGMM_FIELDS(Problem, m, n, k, dtype, b_layout);
AGMM_FIELDS(KernelShape, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, timed);
AGMM_FIELDS(KernelConfig, shape, max_swizzle, raster, splits);
AGMM_FIELDS(PushOrder, chunks, log_parts, head_chunks, head_level, tail_level, rounds, chunk_at);
AGMM_FIELDS(SmPushArgs::Place, rows, signals);
AGMM_FIELDS(SmPushArgs, rank, world_size, slot, shard, rows, row_vectors, chunk_vectors, order,
            first_peers, consumers_copy, places, head, tail, tag, credits, claims, tail_claims, go);
AGMM_FIELDS(AsyncInputArgs, problem, config, a, a_local, b, ldb, bias, out, a_out, signals,
            ready_value, chunks_m, chunks_k, chunk_pivot, local_begin, local_end, sm_count, rank,
            chunks_per_rank, mismatch_is_fatal, tags, count_bits, limit_ns, report, release_signals,
            release_count, counters, counter_count, peer_credits, peer_count, sent, push,
            split_scratch, report_lock, tile_times);

}  // namespace agmm
