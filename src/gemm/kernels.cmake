cmake_policy(VERSION 3.25)  # as CMakeLists.txt, where the table is included alone

# The kernel table: tile_m tile_n tile_k cluster_m cluster_n schedule set, and perhaps swapped
# (KernelShape) and ci. Each row is built for bf16 and fp16 and for both layouts of B, full and lean
# (KernelEntry).
# set: minimal kernels are in every build, default ones in AGMM_KERNELS=default and all, the others
# in all only: on H200 they hardly gain (docs/dev/tried.md), and are there to be measured
# elsewhere. timed: the variant that records when each tile waited and ran, for pictures; in every
# build, bf16 and column-major.
# ci: AGMM_KERNELS=ci has this row too. That set is for machines that compile kernels and cannot run
# them: it has a kernel of each kind (tests/tooling/test_kernel_sets.py says what a kind is), and of
# 16 bits each for bf16 with column-major B and for fp16 with row-major B.
set(AGMM_KERNEL_TABLE
    "128 256 64 2 1 Cooperative default"
    "128 256 64 1 1 Cooperative default ci"
    "128 224 64 2 1 Cooperative default"
    "128 192 64 2 1 Cooperative default"
    "128 112 64 2 1 Cooperative default ci"
    "128 96 64 2 1 Cooperative default"
    "256 144 64 2 1 Cooperative default ci"
    "256 128 64 2 1 Cooperative minimal"
    "128 128 64 1 1 Pingpong    minimal"
    "128 128 64 2 1 Pingpong    default ci"
    "128 160 64 1 1 Pingpong    default ci"
    "64  256 64 1 1 Pingpong    all"
    "128 128 64 2 1 Cooperative all"
    "128 160 64 2 1 Pingpong    all"
    "128 192 64 1 1 Cooperative all"
    "128 256 64 1 2 Cooperative all"
    "256 128 64 1 1 Cooperative all"
    "256 128 64 1 2 Cooperative all"
    "256 192 64 2 1 Cooperative all"
    "256 160 64 1 1 Cooperative all"
    "32  128 64 1 1 Cooperative all swapped"
    "64  128 64 1 1 Cooperative default swapped ci"
    "64  128 64 1 2 Cooperative all swapped"
    "80  128 64 1 1 Cooperative default swapped"
    "96  128 64 1 1 Cooperative default swapped"
    "128 128 64 1 1 Cooperative default swapped"
    "144 128 64 1 1 Cooperative default swapped"
    "160 128 64 1 1 Cooperative default swapped"
    "64  256 64 1 1 Cooperative all swapped"
    "192 128 64 1 1 Cooperative default swapped"
    "208 128 64 1 1 Cooperative default swapped"
    "224 128 64 1 1 Cooperative default swapped"
    "240 128 64 1 2 Cooperative default swapped"
    "144 256 64 1 1 Cooperative default swapped ci"
    "160 256 64 1 2 Cooperative all swapped"
    "176 256 64 1 2 Cooperative default swapped ci"
    "144 256 64 2 1 Cooperative default swapped ci"
    "160 256 64 2 1 Cooperative default swapped"
    "192 256 64 2 1 Cooperative default swapped"
    "32  64  64 1 1 Pingpong    all swapped"
    "64  64  128 1 1 Pingpong   default swapped ci"
    "96  64  128 1 1 Pingpong   default swapped"
    "128 192 64 1 1 Pingpong    default swapped ci"
    "128 128 64 1 1 Pingpong    timed")

# Those of fp8 operands, with column-major B: as above, but before an end of "swapped" how they
# accumulate and for which dtypes (A's, and B's where it is another). Beside the factors of 112 and
# more columns, one for each sum, no register is left (Block1x128).
set(AGMM_FP8_TABLE
    "128 128 128 1 1 Pingpong    default Fast e4m3 ci"
    "64  128 128 1 1 Pingpong    default Fast e4m3"
    "128 256 128 2 1 Cooperative default Fast e4m3 ci"
    "128 224 128 2 1 Cooperative default Fast e4m3 ci"
    "256 160 128 1 1 Cooperative default Fast e4m3 ci"
    "64  128 128 1 1 Cooperative default Fast e4m3 swapped ci"
    "128 128 128 2 1 Cooperative default Slow e4m3 e4m3_e5m2 e5m2_e4m3 ci"
    "128 256 128 2 1 Cooperative default Slow e4m3 ci"
    "128 256 128 2 1 Cooperative default Block e4m3 ci"
    "128 128 128 1 1 Cooperative default Block e4m3 ci"
    "128 96  128 2 1 Cooperative all     Block1x128 e4m3 ci"
    "64  64  128 1 1 Pingpong    default Fast e4m3"
    "128 128 128 2 1 Pingpong    all     Fast e4m3"
    "128 160 128 1 1 Pingpong    default Fast e4m3"
    "256 128 128 2 1 Cooperative all     Fast e4m3"
    "256 128 128 2 1 Cooperative all     Slow e4m3")

# Those of matmul + reduce-scatter, as the first.
set(AGMM_SCATTER_TABLE
    "128 128 64 1 1 Pingpong    minimal"
    "128 256 64 2 1 Cooperative default ci"
    "64  128 64 1 1 Pingpong    default ci"
    "128 128 64 1 1 Cooperative default ci"
    "128 128 64 2 1 Pingpong    all"
    "128 160 64 1 1 Pingpong    all"
    "128 256 64 1 1 Cooperative all"
    "128 128 64 1 1 Pingpong    timed")

# Those of matmul + all-reduce, as the first: pingpong, without clusters.
set(AGMM_LAGGED_TABLE
    "128 128 64 1 1 Pingpong    default ci")

# Those of scaled matmul + reduce-scatter, as those of fp8.
set(AGMM_FP8_SCATTER_TABLE
    "128 128 128 1 1 Pingpong    default Fast e4m3 ci"
    "128 256 128 2 1 Cooperative default Fast e4m3 ci"
    "128 128 128 2 1 Cooperative default Slow e4m3 e4m3_e5m2 e5m2_e4m3 ci"
    "128 256 128 2 1 Cooperative all     Slow e4m3")

# What a row exports, and what instantiates it: of fp8 with other arguments before the last.
set(AGMM_KERNEL_ENTRY KernelEntry)
set(AGMM_FP8_ENTRY KernelEntry)
set(AGMM_SCATTER_ENTRY ScatterEntry)
set(AGMM_LAGGED_ENTRY ScatterEntry)
set(AGMM_FP8_SCATTER_ENTRY ScatterEntry)
set(AGMM_KERNEL_INSTANCE KernelInstance)
set(AGMM_FP8_INSTANCE KernelInstance)
set(AGMM_SCATTER_INSTANCE ScatterInstance)
set(AGMM_LAGGED_INSTANCE ScatterInstance)
set(AGMM_FP8_SCATTER_INSTANCE ScatterInstance)
set(AGMM_FP8_ARGUMENTS "false, false")
set(AGMM_FP8_SCATTER_ARGUMENTS "false")

# Rows in a translation unit. Its first kernel takes most of the time, in headers and in what of CuTe
# the others instantiate too. Three rows, 24 kernels, take up to 7.5 GB of memory, four 9.4; and more
# would leave too few units for many cores. In the set ci a row has half as many kernels, which have
# less in common.
set(AGMM_ROWS_PER_UNIT 3)
set(AGMM_ROWS_PER_UNIT_OF_CI 4)

# Writes the translation units into `directory`, and the table that lists their kernels; returns the
# sources in `out_sources`. Rows of the same schedule and operands share units, as they have most in
# common, and so do those of fp8 of an op.
function(agmm_generate_kernels kernels directory out_sources)
  set(sets minimal timed ${kernels})
  set(usual_operands bf16_row bf16_col fp16_row fp16_col)
  set(rows_per_unit ${AGMM_ROWS_PER_UNIT})
  if(kernels STREQUAL "all")
    list(APPEND sets default)
  elseif(kernels STREQUAL "ci")
    set(usual_operands bf16_col fp16_row)
    set(rows_per_unit ${AGMM_ROWS_PER_UNIT_OF_CI})
  endif()
  set(units)
  foreach(kind IN ITEMS cooperative pingpong cooperative_swapped pingpong_swapped fp8
          fp8_scatter)
    set(rows_${kind} 0)
  endforeach()
  foreach(op IN ITEMS kernel fp8 scatter fp8_scatter lagged)
    string(TOUPPER "${op}" OP)
    set(declarations "")
    set(list "")
    foreach(row IN LISTS AGMM_${OP}_TABLE)
      string(REGEX REPLACE " +" ";" field "${row}")
      list(GET field 0 tile_m)
      list(GET field 1 tile_n)
      list(GET field 2 tile_k)
      list(GET field 3 cluster_m)
      list(GET field 4 cluster_n)
      list(GET field 5 schedule)
      list(GET field 6 set)
      if(NOT set IN_LIST sets AND NOT (kernels STREQUAL "ci" AND "ci" IN_LIST field))
        continue()
      endif()
      string(TOLOWER "${schedule}" schedule_name)
      if("swapped" IN_LIST field)
        string(APPEND schedule_name "_swapped")
      endif()
      set(kind "${schedule_name}")
      if(op MATCHES "^fp8")
        set(kind "${op}")
      endif()
      math(EXPR number "${rows_${kind}} / ${rows_per_unit}")
      math(EXPR rows_${kind} "${rows_${kind}} + 1")
      set(unit "${kind}_${number}")
      list(APPEND units "${unit}")
      set(name "${op}_${tile_m}x${tile_n}x${tile_k}_${cluster_m}x${cluster_n}_${schedule_name}")
      set(arguments "${tile_m}, ${tile_n}, ${tile_k}, ${cluster_m}, ${cluster_n}, Schedule::${schedule}")
      set(operands ${usual_operands})
      if("swapped" IN_LIST field)
        string(APPEND arguments ", false, true")
      endif()
      if(set STREQUAL "timed")
        string(APPEND name "_timed")
        string(APPEND arguments ", true")
        set(operands bf16_col)
      endif()
      if(op STREQUAL "lagged")
        string(APPEND arguments ", false, Accumulation::Fast, true")
      endif()
      if(op MATCHES "^fp8")
        list(GET field 7 accumulation)
        list(SUBLIST field 8 -1 operands)
        list(REMOVE_ITEM operands swapped ci)
        list(TRANSFORM operands APPEND "_col")
        string(TOLOWER "${name}_${accumulation}" name)
        if(NOT "swapped" IN_LIST field)
          string(APPEND arguments ", ${AGMM_${OP}_ARGUMENTS}")
        endif()
        string(APPEND arguments ", Accumulation::${accumulation}")
      endif()
      foreach(dtype_layout IN LISTS operands)
        set(entry "${name}_${dtype_layout}")
        string(REGEX REPLACE "_([a-z]+)$" ", \\1" template_operands "${dtype_layout}")
        set(declaration "extern ${AGMM_${OP}_ENTRY} const ${entry};\n")
        string(APPEND declarations "${declaration}")
        string(APPEND list "\n    &${entry},")
        string(APPEND entries_${unit} "${declaration}${AGMM_${OP}_ENTRY} const ${entry} =\n"
               "    ${AGMM_${OP}_INSTANCE}<${template_operands}, ${arguments}>::entry();\n")
      endforeach()
    endforeach()
    set(AGMM_${OP}_DECLARATIONS "${declarations}")
    set(AGMM_${OP}_LIST "${list}")
  endforeach()
  set(sources "${directory}/kernel_table.cpp")
  configure_file("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/kernel_table.cpp.in"
                 "${directory}/kernel_table.cpp" @ONLY)
  list(REMOVE_DUPLICATES units)
  foreach(unit IN LISTS units)
    set(AGMM_ENTRIES "${entries_${unit}}")
    configure_file("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/sm90/instances.cu.in"
                   "${directory}/${unit}.cu" @ONLY)
    list(APPEND sources "${directory}/${unit}.cu")
  endforeach()
  set(${out_sources} "${sources}" PARENT_SCOPE)
endfunction()
