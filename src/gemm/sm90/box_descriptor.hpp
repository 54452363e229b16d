// TMA descriptors of boxes whose sizes only the host knows, which cute wants at compile time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cuda_host_adapter.hpp"

namespace agmm {

/// Elements along the direction of a matrix in which they are neighbours, and along the other.
struct Extent {
  int32_t along = 0;
  int32_t across = 0;
};

/// The descriptor that make_tma_copy makes for a matrix in shared memory with 128 bytes of swizzle,
/// in boxes of that size. It is all zeros, like cute's, where the driver refuses it.
template <class Element>
cute::TmaDescriptor box_descriptor(Element const* ptr, Extent size, int64_t leading, Extent box) {
  uint64_t const shape[] = {uint64_t(size.along), uint64_t(size.across)};
  uint64_t const leading_bytes[] = {uint64_t(leading) * sizeof(Element)};
  uint32_t const box_shape[] = {uint32_t(box.along), uint32_t(box.across)};
  uint32_t const steps[] = {1, 1};
  cute::TmaDescriptor descriptor{};
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &descriptor, cute::TMA::to_CUtensorMapDataType<std::remove_const_t<Element>>(), 2,
      const_cast<std::remove_const_t<Element>*>(ptr), shape, leading_bytes, box_shape, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? descriptor : cute::TmaDescriptor{};
}

}  // namespace agmm
