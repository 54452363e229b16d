# The architectures of the kernels that need no tensor cores, which run on every GPU from sm_80 on.
#
# 80 is its PTX too, which the driver compiles for GPUs that are not in the list. 8.6 runs the code of
# 80, 10.3 that of 100. Builds for use have code for the others, so that no driver has to compile it.
function(agmm_small_architectures kernels variable)
  set(architectures 80 90a-real)
  if(kernels MATCHES "^(default|all)$")
    list(APPEND architectures 89-real 100-real 120-real)
  endif()
  set(${variable} "${architectures}" PARENT_SCOPE)
endfunction()
