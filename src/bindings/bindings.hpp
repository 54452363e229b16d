#pragma once

#include <stdexcept>
#include <string>

#include "agmm/problem.hpp"

namespace agmm {

inline Raster parse_raster(const std::string& name) {
  if (name == "along_m") return Raster::AlongM;
  if (name == "along_n") return Raster::AlongN;
  throw std::invalid_argument("raster: found '" + name + "', wanted along_m or along_n");
}

inline Schedule parse_schedule(const std::string& name) {
  if (name == "cooperative") return Schedule::Cooperative;
  if (name == "pingpong") return Schedule::Pingpong;
  throw std::invalid_argument("schedule: found '" + name + "', wanted cooperative or pingpong");
}

}  // namespace agmm
