# Turns DS4_CUDA from what was asked for (AUTO) to what is built (ON or OFF), and has the two ways to
# compile kernel sources.
if(DS4_SANITIZE)
  # Sanitizers watch the emulated flavour; on a GPU compute-sanitizer does (scripts/gpu_check.sh).
  if(DS4_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DS4_SANITIZE and DS4_CUDA=ON do not go together: leave one of them out")
  endif()
  set(DS4_CUDA OFF)
elseif(DS4_CUDA STREQUAL "AUTO")
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_FOUND AND CUDAToolkit_NVCC_EXECUTABLE)
    set(DS4_CUDA ON)
  else()
    message(STATUS "CUDA: no toolkit with nvcc found, not built")
    set(DS4_CUDA OFF)
  endif()
elseif(DS4_CUDA)
  find_package(CUDAToolkit REQUIRED)
  if(NOT CUDAToolkit_NVCC_EXECUTABLE)
    message(FATAL_ERROR "DS4_CUDA=ON, but the CUDA toolkit in ${CUDAToolkit_BIN_DIR} has no nvcc")
  endif()
endif()

if(DS4_CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})  # not on PATH everywhere
  endif()
  if(NOT CMAKE_CUDA_HOST_COMPILER)
    set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
  endif()
  set(CMAKE_CUDA_ARCHITECTURES ${DS4_CUDA_ARCHITECTURES})
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know that nvcc has it
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")
  if(DS4_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${DS4_CCACHE})
  endif()
  find_path(DS4_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  message(STATUS "CUDA: ${CUDAToolkit_VERSION}, for ${DS4_CUDA_ARCHITECTURES}")
endif()

# ds4_cuda_kernels(name source.cu...): a static library of kernels for GPUs.
function(ds4_cuda_kernels name)
  add_library(${name} STATIC ${ARGN})
  # No unity: private names of different kernels may be equal. No fused multiply-add but where fmaf
  # says so, as on the CPU (docs/adr/0004): else two instances of one template could differ in bits.
  set_target_properties(${name} PROPERTIES UNITY_BUILD OFF CUDA_RUNTIME_LIBRARY Static)
  target_compile_options(${name} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;-Werror=all-warnings;-Xcompiler=-Wall,-Wextra>")
  target_link_libraries(${name} PUBLIC CUDA::cudart_static)
endfunction()

# ds4_emulated_kernels(name source.cu...): the same for this host's CPU. CMake ties .cu to nvcc, so
# each is included by a .cc of one line.
function(ds4_emulated_kernels name)
  set(wrappers)
  foreach(source ${ARGN})
    get_filename_component(stem ${source} NAME_WE)
    set(wrapper ${CMAKE_CURRENT_BINARY_DIR}/${name}/${stem}_emulated.cc)
    file(CONFIGURE OUTPUT ${wrapper} CONTENT "#include \"${source}\"\n")
    list(APPEND wrappers ${wrapper})
  endforeach()
  add_library(${name} STATIC ${wrappers})
  set_target_properties(${name} PROPERTIES UNITY_BUILD OFF)
  # g++ knows no "#pragma unroll count", so count looks unused; and it cannot follow arrays through
  # loops that nvcc unrolls.
  set(options -Wno-unknown-pragmas -Wno-unused-variable -Wno-maybe-uninitialized)
  if(DS4_SANITIZE MATCHES "undefined")
    # ASan is what finds the faults of kernels; UBSan would triple the time to compile them.
    list(APPEND options -fno-sanitize=undefined)
  endif()
  set_source_files_properties(${wrappers} PROPERTIES COMPILE_OPTIONS "${options}")
endfunction()
