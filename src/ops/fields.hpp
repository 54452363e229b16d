// Equality and hashes of plain structs, from the list of each one's fields.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "agmm/fields.hpp"

namespace agmm {

namespace fields_detail {

template <class T, class = void>
struct HasFields : std::false_type {};
template <class T>
struct HasFields<T, std::void_t<decltype(fields_of(std::declval<T const&>()))>> : std::true_type {};

template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};

template <class T>
bool is_same(T const& a, T const& b);

template <class Tuple, std::size_t... i>
bool are_same(Tuple const& a, Tuple const& b, std::index_sequence<i...>) {
  return (is_same(std::get<i>(a), std::get<i>(b)) && ...);
}

template <class T>
bool is_same(T const& a, T const& b) {
  if constexpr (std::is_array_v<T>) {
    for (std::size_t i = 0; i < std::extent_v<T>; ++i) {
      if (!is_same(a[i], b[i])) return false;
    }
    return true;
  } else if constexpr (IsVector<T>::value) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), is_same<typename T::value_type>);
  } else if constexpr (HasFields<T>::value) {
    auto const fields = fields_of(a);
    constexpr std::size_t kCount = std::tuple_size_v<decltype(fields)>;
    return are_same(fields, fields_of(b), std::make_index_sequence<kCount>{});
  } else {
    return a == b;
  }
}

template <class T>
void mix(std::size_t& seed, T const& value) {
  if constexpr (std::is_array_v<T>) {
    return;  // long, and hardly ever all that differs
  } else if constexpr (HasFields<T>::value) {
    std::apply([&seed](auto const&... field) { (mix(seed, field), ...); }, fields_of(value));
  } else {
    seed ^= std::hash<T>{}(value) + 0x9e3779b97f4a7c15ull + (seed << 6) + (seed >> 2);
  }
}

}  // namespace fields_detail

/// Whether all fields are equal, those of fields, arrays and vectors too.
template <class T>
bool same_fields(T const& a, T const& b) {
  return fields_detail::is_same(a, b);
}

template <class T>
std::size_t hash_of_fields(T const& value) {
  std::size_t seed = 0;
  fields_detail::mix(seed, value);
  return seed;
}

}  // namespace agmm
