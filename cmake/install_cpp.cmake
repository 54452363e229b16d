# Installs the C++ API with a CMake package: find_package(agmm). See docs/reference/cpp.md.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/agmm")
set(detail_dir "${CMAKE_INSTALL_INCLUDEDIR}/agmm/detail")

add_library(agmm_headers INTERFACE)
set_target_properties(agmm_headers PROPERTIES EXPORT_NAME headers)
target_include_directories(agmm_headers INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(agmm_headers INTERFACE cxx_std_17)

add_library(agmm_scheduler INTERFACE)
set_target_properties(agmm_scheduler PROPERTIES EXPORT_NAME scheduler)
target_include_directories(agmm_scheduler INTERFACE $<INSTALL_INTERFACE:${detail_dir}>)
target_link_libraries(agmm_scheduler INTERFACE agmm_headers)

set(installed agmm_headers agmm_scheduler)
if(with_cuda)
  add_library(agmm_static STATIC ${host_sources} ${kernel_objects})
  set_target_properties(agmm_static PROPERTIES EXPORT_NAME agmm OUTPUT_NAME agmm LINKER_LANGUAGE CXX)
  target_include_directories(agmm_static PRIVATE include src)
  target_compile_options(agmm_static PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
  target_link_libraries(agmm_static PUBLIC agmm_headers CUDA::cudart_static Threads::Threads)
  list(APPEND installed agmm_static)
endif()

install(TARGETS ${installed} EXPORT agmm-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
install(EXPORT agmm-targets NAMESPACE agmm:: DESTINATION ${package_dir} COMPONENT cpp)
install(DIRECTORY include/agmm DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp)
# What the scheduler's header reaches.
foreach(header order/chunking order/host_device order/lagged_order sync/device_wait
               sync/named_barrier sync/wait_limit sync/wait_report gemm/split_k)
  get_filename_component(role "${header}" DIRECTORY)
  install(FILES "src/${header}.hpp" DESTINATION "${detail_dir}/${role}" COMPONENT cpp)
endforeach()

configure_package_config_file(cmake/agmm-config.cmake.in "${CMAKE_CURRENT_BINARY_DIR}/agmm-config.cmake"
                              INSTALL_DESTINATION ${package_dir})
# 0.x: another minor version is another API.
string(REGEX MATCH "^[0-9.]+[0-9]" package_version "${AGMM_VERSION}")
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/agmm-config-version.cmake"
                                 VERSION "${package_version}" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/agmm-config.cmake"
              "${CMAKE_CURRENT_BINARY_DIR}/agmm-config-version.cmake"
        DESTINATION ${package_dir} COMPONENT cpp)
