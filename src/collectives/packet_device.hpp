// Device side of packets: data and signal in one store.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "symmetric/collective_layout.hpp"

namespace agmm {

/// `flag` is 0 where no packet has come since the last was taken out.
struct alignas(kGroupBytes) Packet {
  static constexpr int kWords = kPacketDataBytes / 4;
  uint32_t data[kWords];
  uint32_t flag;
};
static_assert(sizeof(Packet) == kGroupBytes);

// The store has one scalar of 128 bits, so that the packet is seen as a whole or not at all. A
// vector of four words would be four accesses to PTX's memory model.
CUTLASS_DEVICE void store_packet(Packet* to, Packet const& packet) {
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 all;\n"
      "mov.b64 low, {%1, %2};\n"
      "mov.b64 high, {%3, %4};\n"
      "mov.b128 all, {low, high};\n"
      "st.relaxed.sys.global.b128 [%0], all;\n"
      "}\n" ::"l"(to),
      "r"(packet.data[0]), "r"(packet.data[1]), "r"(packet.data[2]), "r"(packet.flag)
      : "memory");
}

CUTLASS_DEVICE Packet load_packet(Packet const* from) {
  Packet packet;
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 all;\n"
      "ld.relaxed.sys.global.b128 all, [%4];\n"
      "mov.b128 {low, high}, all;\n"
      "mov.b64 {%0, %1}, low;\n"
      "mov.b64 {%2, %3}, high;\n"
      "}\n"
      : "=r"(packet.data[0]), "=r"(packet.data[1]), "=r"(packet.data[2]), "=r"(packet.flag)
      : "l"(from)
      : "memory");
  return packet;
}

/// Loads the packet where `wanted`, without a branch, so that several loads are under way together.
CUTLASS_DEVICE void load_packet_if(bool wanted, Packet& packet, Packet const* from) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 all;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "mov.b64 low, {%0, %1};\n"
      "mov.b64 high, {%2, %3};\n"
      "mov.b128 all, {low, high};\n"
      "@p ld.relaxed.sys.global.b128 all, [%4];\n"
      "mov.b128 {low, high}, all;\n"
      "mov.b64 {%0, %1}, low;\n"
      "mov.b64 {%2, %3}, high;\n"
      "}\n"
      : "+r"(packet.data[0]), "+r"(packet.data[1]), "+r"(packet.data[2]), "+r"(packet.flag)
      : "l"(from), "r"(uint32_t(wanted))
      : "memory");
}

}  // namespace agmm
