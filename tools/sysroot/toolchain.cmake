# The toolchain of `make wheel SYSROOT=1` and `make wheel ARCH=aarch64`: this machine's compilers, with the libraries and
# headers of Ubuntu 18.04 that fetch.sh unpacks into CMAKE_SYSROOT. Libraries that are linked with glibc 2.27 and GCC 8's
# libstdc++ run with these and all newer versions. If the source uses a newer function, the compiler reports an error.
set(CMAKE_SYSTEM_NAME Linux)
if (EXISTS ${CMAKE_SYSROOT}/usr/lib/x86_64-linux-gnu)
    set(CMAKE_SYSTEM_PROCESSOR x86_64)
    # GCC compiles, as in a build from source, because moegguf adjusts the threads of GCC's OpenMP library. The C++ headers
    # and libstdc++ are GCC 8's, but libgcc.a is this GCC's, because __builtin_cpu_supports() needs its own version.
    set(CMAKE_C_COMPILER gcc)
    set(CMAKE_CXX_COMPILER g++)
    set(moegguf_headers ${CMAKE_SYSROOT}/usr/include)
    set(CMAKE_CXX_FLAGS_INIT "-nostdinc++ -isystem ${moegguf_headers}/c++/8 -isystem ${moegguf_headers}/x86_64-linux-gnu/c++/8")
    set(moegguf_libraries ${CMAKE_SYSROOT}/usr/lib)
    set(moegguf_linked "-L${moegguf_libraries}/gcc/x86_64-linux-gnu/8 -L${moegguf_libraries}/x86_64-linux-gnu")
else()
    set(CMAKE_SYSTEM_PROCESSOR aarch64)
    # GCC before 14 does not support every variant of ggml's CPU backend for ARM. clang finds GCC 8's files by itself.
    find_program(CMAKE_C_COMPILER NAMES clang-21 clang-20 clang-19 clang REQUIRED)
    get_filename_component(moegguf_clang ${CMAKE_C_COMPILER} NAME)
    string(REPLACE clang clang++ moegguf_clang ${moegguf_clang})
    find_program(CMAKE_CXX_COMPILER NAMES ${moegguf_clang} REQUIRED)
    set(CMAKE_C_COMPILER_TARGET aarch64-linux-gnu)
    set(CMAKE_CXX_COMPILER_TARGET aarch64-linux-gnu)
    set(moegguf_linked -fuse-ld=lld)
endif()
# std::filesystem of GCC 8, and what fetch.sh collects, are in static libraries, of which nothing is exported.
set(CMAKE_CXX_STANDARD_LIBRARIES_INIT "-lstdc++fs -lstdc++_nonshared")
set(CMAKE_SHARED_LINKER_FLAGS_INIT "${moegguf_linked} -Wl,--exclude-libs,libstdc++fs.a:libstdc++_nonshared.a")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "${CMAKE_SHARED_LINKER_FLAGS_INIT}")
set(CMAKE_EXE_LINKER_FLAGS_INIT "${moegguf_linked}")
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
