"""The torch library of agmm and the schemas of its ops."""

from __future__ import annotations

import torch

library = torch.library.Library("agmm", "DEF")
library.define(
    "_async_input_mm(Tensor a, Tensor b, Tensor a_chunk_signals, int a_chunk_pivot) -> Tensor"
)
library.define(
    "_async_input_scaled_mm(Tensor A, Tensor B, Tensor scale_a, Tensor scale_b, Tensor? bias, "
    "Tensor a_chunk_signals, int a_chunk_pivot, bool use_fast_accum) -> Tensor"
)
library.define(
    "_fused_all_gather_matmul_native(Tensor A_shard, Tensor B, str group_name) "
    "-> (Tensor A, Tensor out)"
)
# The world size is an argument, so that a graph that torch.compile keeps on disk serves groups of
# that size only: shapes follow from it, and a group's name says nothing of it.
library.define(
    "_all_gather_matmul(Tensor A_shard, Tensor[] Bs, Tensor?[] biases, str group_name, "
    "int world_size, int gather_dim, bool return_A, str config, bool strict, "
    "bool save_gathered=False, bool prefer_fused=False) -> (Tensor A, Tensor[] outs)"
)
library.define(
    "_fused_matmul_reduce_scatter_native(Tensor A, Tensor B, str reduce_op, str group_name) "
    "-> Tensor"
)
library.define(
    "_matmul_reduce_scatter(Tensor[] As, Tensor[] Bs, Tensor? bias, str group_name, "
    "int world_size, int scatter_dim, str reduce_op, bool strict=False) -> Tensor"
)
library.define(
    "_matmul_all_reduce(Tensor A, Tensor B, Tensor? bias, str group_name, int world_size, "
    "bool strict=False) -> Tensor"
)
library.define(
    "_all_gather(Tensor x, str group_name, int world_size, int dim, bool strict=False, "
    "bool low_contention=False) -> Tensor"
)
library.define(
    "_reduce_scatter(Tensor x, str group_name, int world_size, str op, int dim, "
    "bool strict=False, bool low_contention=False) -> Tensor"
)
library.define(
    "_all_reduce(Tensor x, str group_name, int world_size, str op, bool strict=False) -> Tensor"
)
library.define(
    "_all_reduce_rms_norm(Tensor x, Tensor residual, Tensor weight, str group_name, "
    "int world_size, float eps, bool strict=False) -> (Tensor normed, Tensor residual)"
)
library.define(
    "_all_gather_scaled_matmul(Tensor A_shard, Tensor scale_a, Tensor[] Bs, Tensor[] scale_bs, "
    "Tensor?[] biases, Tensor?[] result_scales, str group_name, int world_size, int gather_dim, "
    "bool return_A, ScalarType out_dtype, bool use_fast_accum, bool strict=False, "
    'str quantize="", str config="") -> (Tensor A, Tensor scale_A, Tensor[] outs)'
)
library.define(
    "_scaled_matmul_reduce_scatter(Tensor[] As, Tensor[] Bs, Tensor[] scale_as, "
    "Tensor[] scale_bs, Tensor? bias, Tensor? result_scale, str group_name, int world_size, "
    "int scatter_dim, str reduce_op, ScalarType out_dtype, bool use_fast_accum, "
    "bool strict=False) -> Tensor"
)
library.define(
    "_scaled_matmul_all_reduce(Tensor A, Tensor B, Tensor scale_a, Tensor scale_b, Tensor? bias, "
    "Tensor? result_scale, str group_name, int world_size, ScalarType out_dtype, "
    "bool use_fast_accum, bool strict=False) -> Tensor"
)
library.define(
    "_all_gather_packed_matmul(Tensor A_shard, Tensor[] packed, int[] ns, int[] group_sizes, "
    "Tensor?[] biases, str group_name, int world_size, int gather_dim, bool return_A, bool strict) "
    "-> (Tensor A, Tensor[] outs)"
)
library.define(
    "_scaled_matmul(Tensor A, Tensor scale_a, Tensor B, Tensor scale_b, ScalarType out_dtype, "
    "bool use_fast_accum) -> Tensor"
)
