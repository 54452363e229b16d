// Weights of 4 bits with scales of groups, as streaming kernels read them: 64 columns by 128 of K,
// an atom, lie together in memory, each thread's values where the wgmma wants them. So a stage is
// one bulk copy, a thread reads its values by two loads of 16 bytes, and makes bfloat16 of them in
// registers, from which the wgmma takes its first operand.
//
// An atom has 4096 bytes of values, then the scales of its columns: of each group of 128 of K in
// float32, or of each group of 32 in bfloat16. Thread t of a warpgroup has words 0 to 3 at 16 * t,
// and words 4 to 7 2048 bytes further. Word s is for K from 16 * s on. With q = t % 4, and the row
// (a column of B) that fragment_row() says, nibble i, for i from 0 to 3, is of row 8 * (i % 2)
// further and of K 2 * q + 8 * (i / 2); nibble i + 4 is of the next K. A value of v is stored as v
// + 8.
//
// Sums of a group are added to float32 sums times its scale, so nothing is rounded but the result.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"
#include "gemm/sm90/wgmma.hpp"

namespace agmm {

/// kGroups: how many groups the 128 of K of an atom have, 1 or 4.
template <int kGroups>
struct PackedAtom {
  static_assert(kGroups == 1 || kGroups == 4);
  using Scale = std::conditional_t<kGroups == 1, float, cutlass::bfloat16_t>;
  static constexpr int kSteps = 8;  // of 16 of K
  static constexpr int kStepsOfGroup = kSteps / kGroups;
  static constexpr int kValueBytes = kAtomRows * 64;
  static constexpr int kBytes = kValueBytes + kGroups * kAtomRows * int(sizeof(Scale));

  /// Makes two bfloat16 of the nibbles at bits 0 and 16, exactly: 128 + v has their pattern in its
  /// last bits.
  CUTLASS_DEVICE static uint32_t two_of(uint32_t nibbles) {
    uint32_t const large = (nibbles & 0x000f000fu) | 0x43004300u;
    uint32_t found;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(large), "r"(0x43084308u));
    return found;
  }

  using Values = uint32_t[kSteps][4];

  /// A thread's values, in the order of a wgmma's first operand.
  CUTLASS_DEVICE static void read(uint8_t const* atom, int thread, Values& values) {
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      auto const four = *reinterpret_cast<uint4 const*>(atom + half * 2048 + thread * 16);
      uint32_t const words[] = {four.x, four.y, four.z, four.w};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) values[4 * half + i][j] = two_of(words[i] >> (4 * j));
      }
    }
  }

  /// The scale of a group of a column.
  CUTLASS_DEVICE static float scale(uint8_t const* atom, int group, int column) {
    auto const* const scales = reinterpret_cast<Scale const*>(atom + kValueBytes);
    return float(scales[group * kAtomRows + column]);
  }
};

/// sum = A * B, or sum + A * B if `adds`; A, of bfloat16, is in registers, B along K in shared
/// memory.
template <int kColumns>
CUTLASS_DEVICE void wgmma_of_registers(float (&sum)[kColumns / 2], uint32_t const (&a)[4],
                                       uint64_t b, int32_t adds) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(kColumns == 32 || kColumns == 64);
  // The last six: the numbers of the operands behind the sums.
#define AGMM_WGMMA_OF_REGISTERS(columns, a0, a1, a2, a3, b_, adds_)                             \
  asm volatile(                                                                                 \
      "{\n"                                                                                     \
      ".reg .pred p;\n"                                                                         \
      "setp.ne.b32 p, %" #adds_                                                                 \
      ", 0;\n"                                                                                  \
      "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" AGMM_NUMBERS_##columns \
      "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_                                      \
      ", p, 1, 1, 0;\n"                                                                         \
      "}\n"                                                                                     \
      : AGMM_FLOATS_##columns                                                                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))
  if constexpr (kColumns == 32) {
    AGMM_WGMMA_OF_REGISTERS(32, 16, 17, 18, 19, 20, 21);
  } else {
    AGMM_WGMMA_OF_REGISTERS(64, 32, 33, 34, 35, 36, 37);
  }
#undef AGMM_WGMMA_OF_REGISTERS
#endif
}

}  // namespace agmm
