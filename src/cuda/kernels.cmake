# The kernel table: tile_m tile_n tile_k cluster_m cluster_n schedule set. Each row is built for bf16
# and fp16 and for both layouts of B.
# set: minimal kernels are in every build, default ones in AGMM_KERNELS=default. timed: the variant
# that records when each tile waited and ran, for pictures; in every build, bf16 and column-major.
set(AGMM_KERNEL_TABLE
    "128 256 64 2 1 Cooperative default"
    "128 256 64 1 1 Cooperative default"
    "128 192 64 2 1 Cooperative default"
    "256 128 64 2 1 Cooperative minimal"
    "128 128 64 1 1 Pingpong    minimal"
    "128 128 64 2 1 Pingpong    default"
    "128 160 64 1 1 Pingpong    default"
    "128 128 64 1 1 Pingpong    timed")

# Writes one translation unit per row, dtype and layout into `directory`, and the table that lists
# them; returns the sources in `out_sources`.
function(agmm_generate_kernels kernels directory out_sources)
  set(sources)
  set(declarations)
  set(list)
  foreach(row IN LISTS AGMM_KERNEL_TABLE)
    string(REGEX REPLACE " +" ";" field "${row}")
    list(GET field 0 tile_m)
    list(GET field 1 tile_n)
    list(GET field 2 tile_k)
    list(GET field 3 cluster_m)
    list(GET field 4 cluster_n)
    list(GET field 5 AGMM_SCHEDULE)
    list(GET field 6 set)
    if(kernels STREQUAL "minimal" AND set STREQUAL "default")
      continue()
    endif()
    set(AGMM_TILE "${tile_m}, ${tile_n}, ${tile_k}")
    set(AGMM_CLUSTER "${cluster_m}, ${cluster_n}")
    string(TOLOWER "${AGMM_SCHEDULE}" schedule)
    set(AGMM_TIMED false)
    if(set STREQUAL "timed")
      set(AGMM_TIMED true)
      string(APPEND schedule "_timed")
    endif()
    foreach(dtype bf16 fp16)
      foreach(layout row col)
        if(AGMM_TIMED AND NOT "${dtype} ${layout}" STREQUAL "bf16 col")
          continue()
        endif()
        if(dtype STREQUAL "bf16")
          set(AGMM_ELEMENT cutlass::bfloat16_t)
        else()
          set(AGMM_ELEMENT cutlass::half_t)
        endif()
        if(layout STREQUAL "row")
          set(AGMM_LAYOUT_B cutlass::layout::RowMajor)
        else()
          set(AGMM_LAYOUT_B cutlass::layout::ColumnMajor)
        endif()
        set(AGMM_ENTRY
            "kernel_${tile_m}x${tile_n}x${tile_k}_${cluster_m}x${cluster_n}_${schedule}_${dtype}_${layout}"
        )
        set(source "${directory}/${AGMM_ENTRY}.cu")
        configure_file("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/kernel_instance.cu.in" "${source}" @ONLY)
        list(APPEND sources "${source}")
        string(APPEND declarations "extern KernelEntry const ${AGMM_ENTRY};\n")
        string(APPEND list "\n    &${AGMM_ENTRY},")
      endforeach()
    endforeach()
  endforeach()
  set(AGMM_ENTRY_DECLARATIONS "${declarations}")
  set(AGMM_ENTRY_LIST "${list}")
  configure_file("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/kernel_table.cpp.in"
                 "${directory}/kernel_table.cpp" @ONLY)
  list(APPEND sources "${directory}/kernel_table.cpp")
  set(${out_sources} "${sources}" PARENT_SCOPE)
endfunction()
