// avx512.cpp: the kernels for processors with AVX-512 (BW, DQ and VL) and its VNNI.
#include "isa_avx512.h"

#include "attention.h"
#include "plain.h"
#include "tile.h"

namespace moegguf::kernels {
const Kernels avx512 = {find<Avx512>, find_plain<Avx512>, find_floats<Avx512>, &attention_kernels<Avx512>};
} // namespace moegguf::kernels
