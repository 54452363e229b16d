// The warpgroup MMA of bf16, fp16 or fp8 operands in shared memory, 64 rows by any multiple of 8
// columns up to 256. Not CUTLASS's: those beside the usual widths are in headers (thousands of
// structs, for every type) that take 29 s of each translation unit's compile time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"

namespace agmm {

/// The operation of a cute::MMA_Atom.
template <class ElementA, class ElementB, int kColumns, cute::GMMA::Major kMajorA,
          cute::GMMA::Major kMajorB>
struct Wgmma {
  template <class Element>
  static constexpr bool kAre =
      std::is_same_v<ElementA, Element> && std::is_same_v<ElementB, Element>;
  template <class Element>
  static constexpr bool kIsFp8 = std::is_same_v<Element, cutlass::float_e4m3_t> ||
                                 std::is_same_v<Element, cutlass::float_e5m2_t>;
  static constexpr bool kAreFp8 = kIsFp8<ElementA> && kIsFp8<ElementB>;
  static constexpr bool kAIsE4m3 = std::is_same_v<ElementA, cutlass::float_e4m3_t>;
  static constexpr bool kBIsE4m3 = std::is_same_v<ElementB, cutlass::float_e4m3_t>;
  static constexpr bool kAreBf16 = kAre<cutlass::bfloat16_t>;
  static_assert(kAreBf16 || kAre<cutlass::half_t> || kAreFp8);
  static_assert(!kAreFp8 || (kMajorA == cute::GMMA::Major::K && kMajorB == cute::GMMA::Major::K),
                "the instruction reads fp8 along K only");
  static_assert(kColumns % 8 == 0 && 8 <= kColumns && kColumns <= 256);
  static constexpr int kFloats = kColumns / 2;  // of each thread
  static constexpr int kDepth = 32 / sizeof(ElementA);

  /// sum = A * B, or sum + A * B if `adds`.
  CUTLASS_HOST_DEVICE static void fma(float (&sum)[kFloats], uint64_t a, uint64_t b, int32_t adds);
};

/// The descriptor by which a wgmma finds 16 columns of K of an operand in rows of 128 bytes: the
/// format of PTX, for swizzles of 128 bytes, whose atoms of 8 rows follow one another. An operand
/// whose neighbours do not lie along K has 64 of them in a row.
CUTLASS_DEVICE uint64_t wgmma_descriptor(uint8_t const* at) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  constexpr uint64_t kAtomStride = uint64_t(8 * 128 / 16) << 32;
  constexpr uint64_t kUnused = uint64_t(1) << 16;
  uint64_t const address = uint32_t(__cvta_generic_to_shared(at)) / 16;
  return kSwizzle128 | kAtomStride | kUnused | address;
}

/// Where the sums of a thread lie in an MMA of a tile that begins at its warpgroups' first row: the
/// first one's row and column. The i-th is 8 * (i / 2 % 2) rows and 8 * (i / 4) + i % 2 columns
/// further.
constexpr int kAtomRows = 64;
CUTLASS_HOST_DEVICE constexpr int fragment_row(int thread) {
  return 16 * (thread / 32) + thread % 32 / 4;
}
CUTLASS_HOST_DEVICE constexpr int fragment_column(int thread) { return 2 * (thread % 4); }

/// The width for a tile, where all columns of a tile are multiplied by one or by several MMAs.
constexpr int wgmma_columns(int tile_columns) {
  int columns = tile_columns < 256 ? tile_columns : 256;
  while (tile_columns % columns != 0) columns -= 8;
  return columns;
}

// What an asm statement names: the accumulators of 8 columns more in each line, and their numbers.
// clang-format off
#define AGMM_FLOATS(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define AGMM_NUMBERS(i, j, k, l) "%" #i ", %" #j ", %" #k ", %" #l
#define AGMM_FLOATS_8 AGMM_FLOATS(0)
#define AGMM_FLOATS_16 AGMM_FLOATS_8, AGMM_FLOATS(4)
#define AGMM_FLOATS_24 AGMM_FLOATS_16, AGMM_FLOATS(8)
#define AGMM_FLOATS_32 AGMM_FLOATS_24, AGMM_FLOATS(12)
#define AGMM_FLOATS_40 AGMM_FLOATS_32, AGMM_FLOATS(16)
#define AGMM_FLOATS_48 AGMM_FLOATS_40, AGMM_FLOATS(20)
#define AGMM_FLOATS_56 AGMM_FLOATS_48, AGMM_FLOATS(24)
#define AGMM_FLOATS_64 AGMM_FLOATS_56, AGMM_FLOATS(28)
#define AGMM_FLOATS_72 AGMM_FLOATS_64, AGMM_FLOATS(32)
#define AGMM_FLOATS_80 AGMM_FLOATS_72, AGMM_FLOATS(36)
#define AGMM_FLOATS_88 AGMM_FLOATS_80, AGMM_FLOATS(40)
#define AGMM_FLOATS_96 AGMM_FLOATS_88, AGMM_FLOATS(44)
#define AGMM_FLOATS_104 AGMM_FLOATS_96, AGMM_FLOATS(48)
#define AGMM_FLOATS_112 AGMM_FLOATS_104, AGMM_FLOATS(52)
#define AGMM_FLOATS_120 AGMM_FLOATS_112, AGMM_FLOATS(56)
#define AGMM_FLOATS_128 AGMM_FLOATS_120, AGMM_FLOATS(60)
#define AGMM_FLOATS_136 AGMM_FLOATS_128, AGMM_FLOATS(64)
#define AGMM_FLOATS_144 AGMM_FLOATS_136, AGMM_FLOATS(68)
#define AGMM_FLOATS_152 AGMM_FLOATS_144, AGMM_FLOATS(72)
#define AGMM_FLOATS_160 AGMM_FLOATS_152, AGMM_FLOATS(76)
#define AGMM_FLOATS_168 AGMM_FLOATS_160, AGMM_FLOATS(80)
#define AGMM_FLOATS_176 AGMM_FLOATS_168, AGMM_FLOATS(84)
#define AGMM_FLOATS_184 AGMM_FLOATS_176, AGMM_FLOATS(88)
#define AGMM_FLOATS_192 AGMM_FLOATS_184, AGMM_FLOATS(92)
#define AGMM_FLOATS_200 AGMM_FLOATS_192, AGMM_FLOATS(96)
#define AGMM_FLOATS_208 AGMM_FLOATS_200, AGMM_FLOATS(100)
#define AGMM_FLOATS_216 AGMM_FLOATS_208, AGMM_FLOATS(104)
#define AGMM_FLOATS_224 AGMM_FLOATS_216, AGMM_FLOATS(108)
#define AGMM_FLOATS_232 AGMM_FLOATS_224, AGMM_FLOATS(112)
#define AGMM_FLOATS_240 AGMM_FLOATS_232, AGMM_FLOATS(116)
#define AGMM_FLOATS_248 AGMM_FLOATS_240, AGMM_FLOATS(120)
#define AGMM_FLOATS_256 AGMM_FLOATS_248, AGMM_FLOATS(124)
#define AGMM_NUMBERS_8 AGMM_NUMBERS(0, 1, 2, 3)
#define AGMM_NUMBERS_16 AGMM_NUMBERS_8 ", " AGMM_NUMBERS(4, 5, 6, 7)
#define AGMM_NUMBERS_24 AGMM_NUMBERS_16 ", " AGMM_NUMBERS(8, 9, 10, 11)
#define AGMM_NUMBERS_32 AGMM_NUMBERS_24 ", " AGMM_NUMBERS(12, 13, 14, 15)
#define AGMM_NUMBERS_40 AGMM_NUMBERS_32 ", " AGMM_NUMBERS(16, 17, 18, 19)
#define AGMM_NUMBERS_48 AGMM_NUMBERS_40 ", " AGMM_NUMBERS(20, 21, 22, 23)
#define AGMM_NUMBERS_56 AGMM_NUMBERS_48 ", " AGMM_NUMBERS(24, 25, 26, 27)
#define AGMM_NUMBERS_64 AGMM_NUMBERS_56 ", " AGMM_NUMBERS(28, 29, 30, 31)
#define AGMM_NUMBERS_72 AGMM_NUMBERS_64 ", " AGMM_NUMBERS(32, 33, 34, 35)
#define AGMM_NUMBERS_80 AGMM_NUMBERS_72 ", " AGMM_NUMBERS(36, 37, 38, 39)
#define AGMM_NUMBERS_88 AGMM_NUMBERS_80 ", " AGMM_NUMBERS(40, 41, 42, 43)
#define AGMM_NUMBERS_96 AGMM_NUMBERS_88 ", " AGMM_NUMBERS(44, 45, 46, 47)
#define AGMM_NUMBERS_104 AGMM_NUMBERS_96 ", " AGMM_NUMBERS(48, 49, 50, 51)
#define AGMM_NUMBERS_112 AGMM_NUMBERS_104 ", " AGMM_NUMBERS(52, 53, 54, 55)
#define AGMM_NUMBERS_120 AGMM_NUMBERS_112 ", " AGMM_NUMBERS(56, 57, 58, 59)
#define AGMM_NUMBERS_128 AGMM_NUMBERS_120 ", " AGMM_NUMBERS(60, 61, 62, 63)
#define AGMM_NUMBERS_136 AGMM_NUMBERS_128 ", " AGMM_NUMBERS(64, 65, 66, 67)
#define AGMM_NUMBERS_144 AGMM_NUMBERS_136 ", " AGMM_NUMBERS(68, 69, 70, 71)
#define AGMM_NUMBERS_152 AGMM_NUMBERS_144 ", " AGMM_NUMBERS(72, 73, 74, 75)
#define AGMM_NUMBERS_160 AGMM_NUMBERS_152 ", " AGMM_NUMBERS(76, 77, 78, 79)
#define AGMM_NUMBERS_168 AGMM_NUMBERS_160 ", " AGMM_NUMBERS(80, 81, 82, 83)
#define AGMM_NUMBERS_176 AGMM_NUMBERS_168 ", " AGMM_NUMBERS(84, 85, 86, 87)
#define AGMM_NUMBERS_184 AGMM_NUMBERS_176 ", " AGMM_NUMBERS(88, 89, 90, 91)
#define AGMM_NUMBERS_192 AGMM_NUMBERS_184 ", " AGMM_NUMBERS(92, 93, 94, 95)
#define AGMM_NUMBERS_200 AGMM_NUMBERS_192 ", " AGMM_NUMBERS(96, 97, 98, 99)
#define AGMM_NUMBERS_208 AGMM_NUMBERS_200 ", " AGMM_NUMBERS(100, 101, 102, 103)
#define AGMM_NUMBERS_216 AGMM_NUMBERS_208 ", " AGMM_NUMBERS(104, 105, 106, 107)
#define AGMM_NUMBERS_224 AGMM_NUMBERS_216 ", " AGMM_NUMBERS(108, 109, 110, 111)
#define AGMM_NUMBERS_232 AGMM_NUMBERS_224 ", " AGMM_NUMBERS(112, 113, 114, 115)
#define AGMM_NUMBERS_240 AGMM_NUMBERS_232 ", " AGMM_NUMBERS(116, 117, 118, 119)
#define AGMM_NUMBERS_248 AGMM_NUMBERS_240 ", " AGMM_NUMBERS(120, 121, 122, 123)
#define AGMM_NUMBERS_256 AGMM_NUMBERS_248 ", " AGMM_NUMBERS(124, 125, 126, 127)
// clang-format on

// The last five: the numbers of the other operands, from `columns` / 2 on.
#define AGMM_WGMMA_OF(type, columns, a_, b_, adds_, major_a, major_b)                         \
  asm volatile(                                                                               \
      "{\n"                                                                                   \
      ".reg .pred p;\n"                                                                       \
      "setp.ne.b32 p, %" #adds_                                                               \
      ", 0;\n"                                                                                \
      "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                   \
      " {" AGMM_NUMBERS_##columns "}, %" #a_ ", %" #b_ ", p, 1, 1, %" #major_a ", %" #major_b \
                                  ";\n"                                                       \
                                  "}\n"                                                       \
      : AGMM_FLOATS_##columns                                                                 \
      : "l"(a), "l"(b), "r"(adds), "n"(int(kMajorA)), "n"(int(kMajorB)))
#define AGMM_WGMMA_OF_FP8(type_a, type_b, columns, a_, b_, adds_, major_a, major_b) \
  asm volatile(                                                                     \
      "{\n"                                                                         \
      ".reg .pred p;\n"                                                             \
      "setp.ne.b32 p, %" #adds_                                                     \
      ", 0;\n"                                                                      \
      "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32." type_a "." type_b     \
      " {" AGMM_NUMBERS_##columns "}, %" #a_ ", %" #b_                              \
                                  ", p, 1, 1;\n"                                    \
                                  "}\n"                                             \
      : AGMM_FLOATS_##columns                                                       \
      : "l"(a), "l"(b), "r"(adds))
#define AGMM_WGMMA(columns, ...)                               \
  if constexpr (kColumns == columns) {                         \
    if constexpr (kAreBf16) {                                  \
      AGMM_WGMMA_OF("bf16", columns, __VA_ARGS__);             \
    } else if constexpr (!kAreFp8) {                           \
      AGMM_WGMMA_OF("f16", columns, __VA_ARGS__);              \
    } else if constexpr (!kAIsE4m3 && !kBIsE4m3) {             \
      AGMM_WGMMA_OF_FP8("e5m2", "e5m2", columns, __VA_ARGS__); \
    } else if constexpr (!kAIsE4m3) {                          \
      AGMM_WGMMA_OF_FP8("e5m2", "e4m3", columns, __VA_ARGS__); \
    } else if constexpr (!kBIsE4m3) {                          \
      AGMM_WGMMA_OF_FP8("e4m3", "e5m2", columns, __VA_ARGS__); \
    } else {                                                   \
      AGMM_WGMMA_OF_FP8("e4m3", "e4m3", columns, __VA_ARGS__); \
    }                                                          \
  }

template <class ElementA, class ElementB, int kColumns, cute::GMMA::Major kMajorA,
          cute::GMMA::Major kMajorB>
CUTLASS_HOST_DEVICE void Wgmma<ElementA, ElementB, kColumns, kMajorA, kMajorB>::fma(
    [[maybe_unused]] float (&sum)[kFloats], [[maybe_unused]] uint64_t a,
    [[maybe_unused]] uint64_t b, [[maybe_unused]] int32_t adds) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  AGMM_WGMMA(8, 4, 5, 6, 7, 8)
  AGMM_WGMMA(16, 8, 9, 10, 11, 12)
  AGMM_WGMMA(24, 12, 13, 14, 15, 16)
  AGMM_WGMMA(32, 16, 17, 18, 19, 20)
  AGMM_WGMMA(40, 20, 21, 22, 23, 24)
  AGMM_WGMMA(48, 24, 25, 26, 27, 28)
  AGMM_WGMMA(56, 28, 29, 30, 31, 32)
  AGMM_WGMMA(64, 32, 33, 34, 35, 36)
  AGMM_WGMMA(72, 36, 37, 38, 39, 40)
  AGMM_WGMMA(80, 40, 41, 42, 43, 44)
  AGMM_WGMMA(88, 44, 45, 46, 47, 48)
  AGMM_WGMMA(96, 48, 49, 50, 51, 52)
  AGMM_WGMMA(104, 52, 53, 54, 55, 56)
  AGMM_WGMMA(112, 56, 57, 58, 59, 60)
  AGMM_WGMMA(120, 60, 61, 62, 63, 64)
  AGMM_WGMMA(128, 64, 65, 66, 67, 68)
  AGMM_WGMMA(136, 68, 69, 70, 71, 72)
  AGMM_WGMMA(144, 72, 73, 74, 75, 76)
  AGMM_WGMMA(152, 76, 77, 78, 79, 80)
  AGMM_WGMMA(160, 80, 81, 82, 83, 84)
  AGMM_WGMMA(168, 84, 85, 86, 87, 88)
  AGMM_WGMMA(176, 88, 89, 90, 91, 92)
  AGMM_WGMMA(184, 92, 93, 94, 95, 96)
  AGMM_WGMMA(192, 96, 97, 98, 99, 100)
  AGMM_WGMMA(200, 100, 101, 102, 103, 104)
  AGMM_WGMMA(208, 104, 105, 106, 107, 108)
  AGMM_WGMMA(216, 108, 109, 110, 111, 112)
  AGMM_WGMMA(224, 112, 113, 114, 115, 116)
  AGMM_WGMMA(232, 116, 117, 118, 119, 120)
  AGMM_WGMMA(240, 120, 121, 122, 123, 124)
  AGMM_WGMMA(248, 124, 125, 126, 127, 128)
  AGMM_WGMMA(256, 128, 129, 130, 131, 132)
#endif
}

/// What cute::MMA_Atom calls. The accumulators are read and written in place.
template <class ElementA, class ElementB, int kColumns, cute::GMMA::Major kMajorA,
          cute::GMMA::Major kMajorB, class Sum, class SumLayout, class A, class ALayout, class B,
          class BLayout, class C, class CLayout>
CUTLASS_HOST_DEVICE void mma_unpack(
    cute::MMA_Traits<Wgmma<ElementA, ElementB, kColumns, kMajorA, kMajorB>> const& traits,
    cute::Tensor<Sum, SumLayout>& sum, cute::Tensor<A, ALayout> const& a,
    cute::Tensor<B, BLayout> const& b, cute::Tensor<C, CLayout> const&) {
  using Op = Wgmma<ElementA, ElementB, kColumns, kMajorA, kMajorB>;
  static_assert(cute::is_rmem<Sum>::value && std::is_same_v<SumLayout, CLayout>);
  static_assert(cute::size(SumLayout{}) == Op::kFloats && cute::cosize(SumLayout{}) == Op::kFloats);
  Op::fma(reinterpret_cast<float (&)[Op::kFloats]>(*sum.data()), uint64_t(*a.data()),
          uint64_t(*b.data()), int32_t(traits.accumulate_));
}

}  // namespace agmm

namespace cute {

template <class ElementA, class ElementB, int kColumns, GMMA::Major kMajorA, GMMA::Major kMajorB>
struct MMA_Traits<agmm::Wgmma<ElementA, ElementB, kColumns, kMajorA, kMajorB>> {
  static constexpr int kDepth = agmm::Wgmma<ElementA, ElementB, kColumns, kMajorA, kMajorB>::kDepth;
  using ValTypeA = ElementA;
  using ValTypeB = ElementB;
  using ValTypeC = float;
  using ValTypeD = float;
  using FrgTypeA = GMMA::smem_desc<kMajorA>;
  using FrgTypeB = GMMA::smem_desc<kMajorB>;
  using Shape_MNK = Shape<_64, Int<kColumns>, Int<kDepth>>;
  using ThrID = Layout<_128>;
  using ALayout = GMMA::ABLayout<64, kDepth>;
  using BLayout = GMMA::ABLayout<kColumns, kDepth>;
  using CLayout = GMMA::CLayout_64xN<kColumns>;

  GMMA::ScaleOut accumulate_ = GMMA::ScaleOut::One;
};

}  // namespace cute
