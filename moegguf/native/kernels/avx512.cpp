// avx512.cpp: the kernels for processors with AVX-512 and its VNNI.
#include "isa_avx512.h"

#include "attention.h"
#include "find.h"
#include "floats.h"

namespace moegguf::kernels {

const Kernel * find_avx512(Layout layout) {
    return find<Avx512>(layout);
}

MultiplyFloats find_floats_avx512(FloatType type) {
    return find_floats<Avx512>(type);
}

const AttentionKernels * find_attention_avx512() {
    return &attention_kernels<Avx512>;
}

} // namespace moegguf::kernels
