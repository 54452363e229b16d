# Leaves in the build tree what AGMM_CORE_DIR reads there. A test build leaves nothing: its modules have
# to be compiled with its definitions.
set(exported_core "${CMAKE_CURRENT_BINARY_DIR}/agmm-core.cmake")
if(AGMM_FAULT OR AGMM_STRESS_DELAYS)
  file(REMOVE "${exported_core}")
else()
  export(TARGETS agmm_core FILE "${CMAKE_CURRENT_BINARY_DIR}/agmm-core-targets.cmake")
  configure_file(cmake/agmm-core.cmake.in "${exported_core}" @ONLY)
endif()
