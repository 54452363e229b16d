# Finds the CUTLASS headers: CUTLASS_DIR (cache or environment variable; a CUTLASS checkout or an
# include folder), else the PyPI package nvidia-cutlass in the build's Python. Holds no vendored code.
#
# Defines CUTLASS_INCLUDE_DIR, CUTLASS_VERSION and the target agmm::cutlass.
set(_cutlass_hints)
if(CUTLASS_DIR)
  list(APPEND _cutlass_hints "${CUTLASS_DIR}")
elseif(DEFINED ENV{CUTLASS_DIR})
  list(APPEND _cutlass_hints "$ENV{CUTLASS_DIR}")
else()
  # Not imported: importing the package needs its Python dependencies, the headers do not.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.metadata as m; print(m.distribution('nvidia-cutlass').locate_file('cutlass_library/source'))"
    OUTPUT_VARIABLE _cutlass_package
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  list(APPEND _cutlass_hints "${_cutlass_package}")
endif()

unset(CUTLASS_INCLUDE_DIR CACHE)
find_path(
  CUTLASS_INCLUDE_DIR cutlass/cutlass.h
  HINTS ${_cutlass_hints}
  PATH_SUFFIXES include
  NO_DEFAULT_PATH)

unset(CUTLASS_VERSION)
set(_cutlass_version_header "${CUTLASS_INCLUDE_DIR}/cutlass/version.h")
if(CUTLASS_INCLUDE_DIR AND EXISTS "${_cutlass_version_header}")
  set(_cutlass_numbers)
  foreach(_part MAJOR MINOR PATCH)
    file(STRINGS "${_cutlass_version_header}" _line REGEX "^#define CUTLASS_${_part} ")
    string(REGEX MATCH "[0-9]+" _number "${_line}")
    list(APPEND _cutlass_numbers "${_number}")
  endforeach()
  list(JOIN _cutlass_numbers "." CUTLASS_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  CUTLASS
  REQUIRED_VARS CUTLASS_INCLUDE_DIR CUTLASS_VERSION
  VERSION_VAR CUTLASS_VERSION
  REASON_FAILURE_MESSAGE
    "looked in ${_cutlass_hints}, wanted the package nvidia-cutlass (pip install nvidia-cutlass==${CUTLASS_FIND_VERSION}.0 --no-deps) or CUTLASS_DIR=<folder with include/cutlass/cutlass.h>"
)

if(CUTLASS_FOUND AND NOT TARGET agmm::cutlass)
  add_library(agmm::cutlass INTERFACE IMPORTED)
  target_include_directories(agmm::cutlass SYSTEM INTERFACE "${CUTLASS_INCLUDE_DIR}")
endif()
