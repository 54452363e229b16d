// The fields of a product, for its equality and hash.
#pragma once

#include "agmm/fused_matmul_reduce_scatter.hpp"
#include "ops/call_fields.hpp"

namespace agmm {

AGMM_FIELDS(Product, a, lda, b, ldb, k);

}  // namespace agmm
