// The element types of a kernel: bfloat16_t or half_t for operands and result, or Fp8.
#pragma once

#include "agmm/problem.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/float8.h"
#include "cutlass/numeric_types.h"

namespace agmm {

/// fp8 operands with scales; the result is bfloat16.
template <class A, class B>
struct Fp8;

/// A of bfloat16, and a weight of 4 bits with so many groups in 128 of K (packed_weight.hpp).
template <int kGroups>
struct PackedBf16;

template <class Element>
struct TypesOf {
  static constexpr int kPackedGroups = 0;  // the weight is not packed
  using A = Element;
  using B = Element;
  using Out = Element;
  static constexpr bool kIsFp8 = false;
};
template <int kGroups>
struct TypesOf<PackedBf16<kGroups>> : TypesOf<cutlass::bfloat16_t> {
  static constexpr int kPackedGroups = kGroups;
};
template <class A_, class B_>
struct TypesOf<Fp8<A_, B_>> {
  static constexpr int kPackedGroups = 0;
  using A = A_;
  using B = B_;
  using Out = cutlass::bfloat16_t;
  static constexpr bool kIsFp8 = true;
};

/// The DType by which a kernel of these element types is found; types that are not listed have
/// none.
template <class Element>
inline constexpr DType kDType = [] {
  static_assert(sizeof(Element) == 0, "element types without a name in agmm::DType");
  return DType{};
}();
template <>
inline constexpr DType kDType<cutlass::bfloat16_t> = DType::BFloat16;
template <>
inline constexpr DType kDType<cutlass::half_t> = DType::Float16;
template <int kGroups>
inline constexpr DType kDType<PackedBf16<kGroups>> = DType::BFloat16;
template <>
inline constexpr DType kDType<Fp8<cutlass::float_e4m3_t, cutlass::float_e4m3_t>> = DType::E4M3;
template <>
inline constexpr DType kDType<Fp8<cutlass::float_e4m3_t, cutlass::float_e5m2_t>> =
    DType::E4M3ByE5M2;
template <>
inline constexpr DType kDType<Fp8<cutlass::float_e5m2_t, cutlass::float_e4m3_t>> =
    DType::E5M2ByE4M3;

}  // namespace agmm
