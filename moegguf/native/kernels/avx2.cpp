// avx2.cpp: the kernels for processors with AVX2, FMA and F16C.
#include "find.h"
#include "isa_avx2.h"

const moegguf::kernels::Kernel * moegguf::kernels::find_avx2(Layout layout) {
    return find<Avx2>(layout);
}
