# The toolchain of `make wheel ARCH=aarch64` on another machine. GCC before 14 does not support every variant of ggml's
# CPU backend, so clang compiles, with the libraries and headers of g++-aarch64-linux-gnu. On Debian and Ubuntu, install
# clang-19 and g++-aarch64-linux-gnu.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
find_program(CLANG NAMES clang-21 clang-20 clang-19 clang REQUIRED)
set(CMAKE_C_COMPILER ${CLANG})
string(REPLACE "clang" "clang++" CLANGXX ${CLANG})
set(CMAKE_CXX_COMPILER ${CLANGXX})
set(CMAKE_C_COMPILER_TARGET aarch64-linux-gnu)
set(CMAKE_CXX_COMPILER_TARGET aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
