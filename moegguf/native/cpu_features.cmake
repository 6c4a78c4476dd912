# Writes the file CPU_FEATURES: the features that a processor needs for libggml-cpu, by their names in /proc/cpuinfo,
# one per line. They are checked before the library is loaded. The file is empty if loading chooses a variant of the
# backend.
set(flag_of_macro
    __SSE3__=pni __SSSE3__=ssse3 __SSE4_1__=sse4_1 __SSE4_2__=sse4_2 __POPCNT__=popcnt __MOVBE__=movbe __LZCNT__=abm
    __AVX__=avx __F16C__=f16c __FMA__=fma __BMI__=bmi1 __BMI2__=bmi2 __AVX2__=avx2 __AVXVNNI__=avx_vnni
    __GFNI__=gfni __VAES__=vaes __VPCLMULQDQ__=vpclmulqdq
    __AVX512F__=avx512f __AVX512CD__=avx512cd __AVX512BW__=avx512bw __AVX512DQ__=avx512dq __AVX512VL__=avx512vl
    __AVX512IFMA__=avx512ifma __AVX512VBMI__=avx512vbmi __AVX512VBMI2__=avx512_vbmi2 __AVX512VNNI__=avx512_vnni
    __AVX512BITALG__=avx512_bitalg __AVX512VPOPCNTDQ__=avx512_vpopcntdq __AVX512BF16__=avx512_bf16
    __AVX512FP16__=avx512_fp16 __AMX_TILE__=amx_tile __AMX_INT8__=amx_int8 __AMX_BF16__=amx_bf16
    __ARM_FEATURE_DOTPROD=asimddp __ARM_FEATURE_FP16_VECTOR_ARITHMETIC=asimdhp __ARM_FEATURE_MATMUL_INT8=i8mm
    __ARM_FEATURE_BF16=bf16 __ARM_FEATURE_SVE=sve __ARM_FEATURE_SVE2=sve2 __ARM_FEATURE_SME=sme)

set(flags "")
if (TARGET ggml-cpu AND NOT GGML_BACKEND_DL AND NOT MSVC)
    get_target_property(options ggml-cpu COMPILE_OPTIONS)
    list(FILTER options INCLUDE REGEX "^-m")
    separate_arguments(everywhere UNIX_COMMAND "${CMAKE_CXX_FLAGS}")
    execute_process(
        COMMAND ${CMAKE_CXX_COMPILER} ${everywhere} ${options} -dM -E -x c++ /dev/null
        OUTPUT_VARIABLE macros COMMAND_ERROR_IS_FATAL ANY)
    foreach (pair IN LISTS flag_of_macro)
        string(REPLACE "=" ";" pair ${pair})
        list(GET pair 0 macro)
        list(GET pair 1 flag)
        if (macros MATCHES "#define ${macro} ")
            string(APPEND flags "${flag}\n")
        endif()
    endforeach()
endif()
file(WRITE ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/CPU_FEATURES "${flags}")
