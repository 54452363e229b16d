# Writes the translation units of the kernels of a build into `directory`, and the table that lists
# them; returns the sources in `out_sources`.
function(agmm_generate_kernels kernels directory out_sources)
  set(root "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..")
  set(generator "${root}/tools/generate_kernels.py")
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${generator}" --kernels "${kernels}" --directory "${directory}"
    OUTPUT_VARIABLE sources
    ERROR_VARIABLE error
    RESULT_VARIABLE result
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${error}")
  endif()
  if(NOT CMAKE_SCRIPT_MODE_FILE)
    set_property(
      DIRECTORY APPEND
      PROPERTY CMAKE_CONFIGURE_DEPENDS
               "${generator}"
               "${root}/python/agmm/planning/kernel_table.py"
               "${root}/python/agmm/planning/kernels.json"
               "${root}/src/gemm/kernel_table.cpp.in"
               "${root}/src/gemm/sm90/instances.cu.in")
  endif()
  set(${out_sources} "${sources}" PARENT_SCOPE)
endfunction()
