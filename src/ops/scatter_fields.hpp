// The fields of a matmul + reduce-scatter, for its equality and hash.
#pragma once

#include "agmm/fused_matmul_reduce_scatter.hpp"
#include "ops/call_fields.hpp"

namespace agmm {

AGMM_FIELDS(Product, a, lda, b, ldb, k, scales);
AGMM_FIELDS(MatmulScatter, rows, n, dtype, b_layout, products, bias, residual, out, is_average,
            all_reduce_sms, accumulation, config, limit_ns, tile_times, epilogue);

}  // namespace agmm
