// avx512.cpp: the kernels for processors with AVX-512 and its VNNI.
#include "find.h"
#include "isa_avx512.h"

const moegguf::kernels::Kernel * moegguf::kernels::find_avx512(Layout layout) {
    return find<Avx512>(layout);
}
