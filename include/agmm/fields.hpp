// One list of a struct's fields, from which its equality, its hash and what Python sees of it come.
#pragma once

#include <tuple>

namespace agmm {

/// Names every field of a struct, in order: fields_of() ties them, names_of_fields() has their
/// names, separated by ", ". It does not compile where one is left out, since a structured binding
/// wants them all; so nothing that is made from the list can forget one.
#define AGMM_FIELDS(Type, ...)                                                       \
  inline auto fields_of(Type const& value) {                                         \
    auto const& [__VA_ARGS__] = value;                                               \
    return std::tie(__VA_ARGS__);                                                    \
  }                                                                                  \
  inline auto fields_of(Type& value) {                                               \
    auto& [__VA_ARGS__] = value;                                                     \
    return std::tie(__VA_ARGS__);                                                    \
  }                                                                                  \
  inline constexpr char const* names_of_fields(Type const&) { return #__VA_ARGS__; } \
  static_assert(true, "a semicolon may follow")

}  // namespace agmm
