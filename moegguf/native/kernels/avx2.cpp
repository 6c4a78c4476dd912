// avx2.cpp: the kernels for processors with AVX2, FMA and F16C.
#include "isa_avx2.h"

#include "attention.h"
#include "find.h"
#include "floats.h"

namespace moegguf::kernels {

const Kernel * find_avx2(Layout layout) {
    return find<Avx2>(layout);
}

MultiplyFloats find_floats_avx2(FloatType type) {
    return find_floats<Avx2>(type);
}

const AttentionKernels * find_attention_avx2() {
    return &attention_kernels<Avx2>;
}

} // namespace moegguf::kernels
