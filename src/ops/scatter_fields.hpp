// The fields of the structs that describe a matmul + reduce-scatter, for its equality and hash.
#pragma once

#include "agmm/fused_matmul_reduce_scatter.hpp"
#include "gemm/scatter_spec.hpp"
#include "ops/call_fields.hpp"

namespace agmm {

AGMM_FIELDS(Product, a, lda, b, ldb, k);
AGMM_FIELDS(FastDiv, divisor, multiplier, shift);
AGMM_FIELDS(ScatterTiles, rank, world_size, chunk_stride, first_row, rows, padded, tiles_m,
            tiles_n);
AGMM_FIELDS(WaitLimit, place, limit_ns, senders, rank);
AGMM_FIELDS(TilePushArgs::Peer, part, signals, credit);
AGMM_FIELDS(TilePushArgs, tiles, tag, scale, parts, part_bytes, signals, credits, go, done, peers,
            limit, pace_cycles);
AGMM_FIELDS(ScatterSpec, config, rows, n, dtype, b_layout, products, product_count, scales,
            accumulation, bias, out, push, sm_count, tile_times);

}  // namespace agmm
