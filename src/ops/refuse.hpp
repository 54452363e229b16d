// How a call that makes no sense is refused.
#pragma once

#include <stdexcept>
#include <string>

namespace agmm {

[[noreturn]] inline void refuse(std::string const& argument, std::string const& found,
                                std::string const& wanted) {
  throw std::invalid_argument(argument + ": found " + found + ", wanted " + wanted);
}

}  // namespace agmm
