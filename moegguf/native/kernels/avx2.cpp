// avx2.cpp: the kernels for processors with AVX2, FMA and F16C.
#include "isa_avx2.h"

#include "attention.h"
#include "plain.h"
#include "tile.h"

namespace moegguf::kernels {
const Kernels avx2 = {find<Avx2>, find_plain<Avx2>, find_floats<Avx2>, &attention_kernels<Avx2>};
} // namespace moegguf::kernels
