// The fields of the structs that describe a call, for its equality and hash.
#pragma once

#include "agmm/fused_all_gather_matmul.hpp"
#include "gemm/call_spec.hpp"
#include "ops/fields.hpp"

namespace agmm {

AGMM_FIELDS(Problem, m, n, k, dtype, b_layout, accumulation, epilogue, activation);
AGMM_FIELDS(Scales, a, b, a_per_row, b_per_column, a_local, a_out, b_k_stride, b_n_stride, b_up);
AGMM_FIELDS(MoreWeight, b, ldb, n, bias, out, scales, scale_k_stride, scale_n_stride);
AGMM_FIELDS(Operands, a, a_local, local_begin, local_end, a_out, b, ldb, bias, out, scales, b_up,
            ldb_up, bias_up, out_scales, given_out_scale, more, more_count);
AGMM_FIELDS(Senders, tags, chunks_per_rank, count_bits, mismatch_is_fatal);
AGMM_FIELDS(Arrival, signals, ready_value, chunks_m, chunks_k, pivot, senders);
AGMM_FIELDS(AsyncInputArgs, problem, config, operands, arrival, rank, limit_ns, sm_count,
            split_scratch, tile_times, weight_is_new);
AGMM_FIELDS(Release, signals, signal_count, counters, counter_count, peer_credits, peer_count,
            sent);
AGMM_FIELDS(PushOrder, chunks, log_parts, head_chunks, head_level, tail_level, rounds, chunk_at);
AGMM_FIELDS(SmPushArgs::Place, rows, signals);
AGMM_FIELDS(SmPushArgs, rank, world_size, slot, shard, rows, row_vectors, chunk_vectors, order,
            first_peers, consumers_copy, places, head, tail, tag, credits, claims, tail_claims, go,
            scales, scales_behind, row_scales);
AGMM_FIELDS(ReportPlace, report, report_lock, late);
AGMM_FIELDS(WaitLimit, place, limit_ns, senders, rank);
AGMM_FIELDS(SecondTensor, in, out, out_stride, first, whole, elements);
AGMM_FIELDS(ExchangeArgs, rank, world_size, in, out, in_stride, out_stride, segment, groups, end,
            whole, elements, scale, tag, second, slots, slot_bytes, stretch_bytes, thread_groups,
            blocks, signals, signal_slot_bytes, turns, own_packets, own_signals,
            packet_stretch_bytes, limit, lets_next_start);
AGMM_FIELDS(StreamedNormArgs, weight, normed, eps, scales, scale_columns, scales_of_row, counters);
AGMM_FIELDS(StreamedExchange, args, residual, is_shared, is_scattered, owned_rows, norm);
AGMM_FIELDS(CallSpec, matmul, release, push, exchange, report_place, starts_early, weight_is_ahead,
            is_behind_gather);
AGMM_FIELDS(SmPushCut, parts, chunk_columns, first_peers, head_chunks);
AGMM_FIELDS(Gather, transport, push, a_shard, a_out, rows, k, dtype, limit_ns, scales, scales_out,
            scale_columns);
AGMM_FIELDS(Weight, b, ldb, b_layout, n, bias, out, config, scales, scale_per_column, accumulation,
            scale_k_stride, scale_n_stride, epilogue, activation, b_up, ldb_up, bias_up, scales_up,
            out_scales, given_out_scale);

}  // namespace agmm
