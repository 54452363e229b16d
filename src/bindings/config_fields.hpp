// The fields of a kernel config as Python sees them, made from the lists of its structs' fields.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "agmm/problem.hpp"
#include "bindings/bindings.hpp"

namespace agmm {

/// Returns the fields of the shape, then the config's own. The config may be const.
template <class Config>
auto fields_of_config(Config& config) {
  return std::apply(
      [](auto& shape, auto&... own) { return std::tuple_cat(fields_of(shape), std::tie(own...)); },
      fields_of(config));
}
using ConfigFields = decltype(fields_of_config(std::declval<KernelConfig&>()));
constexpr std::size_t kConfigFields = std::tuple_size_v<ConfigFields>;
/// The number of a shape's first fields, tile, cluster and schedule, which have no default.
constexpr std::size_t kRequiredFields = 6;

/// The names of the fields of a config, in the order of fields_of_config().
inline std::array<std::string, kConfigFields> const& names_of_config() {
  static std::array<std::string, kConfigFields> const names = [] {
    std::string const all = names_of_fields(KernelShape{}) + std::string(", ") +
                            std::string(names_of_fields(KernelConfig{})).substr(sizeof("shape,"));
    std::array<std::string, kConfigFields> found;
    std::size_t begin = 0;
    for (std::string& name : found) {
      std::size_t const end = std::min(all.find(',', begin), all.size());
      name = all.substr(begin, end - begin);
      begin = end + sizeof(", ") - 1;
    }
    return found;
  }();
  return names;
}

/// The value that Python sees of a field: enumerators become their names.
inline int32_t to_python(int32_t value) { return value; }
inline bool to_python(bool value) { return value; }
inline std::string to_python(Schedule value) { return to_string(value); }
inline std::string to_python(Raster value) { return to_string(value); }
template <class Field>
using InPython = decltype(to_python(std::declval<Field>()));

inline void from_python(int32_t& field, int32_t value) { field = value; }
inline void from_python(bool& field, bool value) { field = value; }
inline void from_python(Schedule& field, std::string const& name) { field = parse_schedule(name); }
inline void from_python(Raster& field, std::string const& name) { field = parse_raster(name); }

/// The constructor's argument for field i, with the struct's default where it has one.
template <std::size_t i>
auto config_argument() {
  pybind11::arg const named(names_of_config()[i].c_str());
  if constexpr (i < kRequiredFields) {
    return named;
  } else {
    KernelConfig usual;
    return named = to_python(std::get<i>(fields_of_config(usual)));
  }
}

/// Binds the constructor, a property for each field, and field_names(), which has the names in
/// order.
template <class Bound, std::size_t... i>
void bind_fields(Bound& bound, std::index_sequence<i...>) {
  bound.def(
      pybind11::init([](InPython<std::decay_t<std::tuple_element_t<i, ConfigFields>>>... given) {
        KernelConfig config;
        auto const fields = fields_of_config(config);
        (from_python(std::get<i>(fields), given), ...);
        return config;
      }),
      config_argument<i>()...);
  (bound.def_property_readonly(
       names_of_config()[i].c_str(),
       [](const KernelConfig& config) { return to_python(std::get<i>(fields_of_config(config))); }),
   ...);
  bound.def_static("field_names", [] {
    return std::vector<std::string>(names_of_config().begin(), names_of_config().end());
  });
}

}  // namespace agmm
