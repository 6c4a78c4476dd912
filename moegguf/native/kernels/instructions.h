// instructions.h: which of the kernels this processor has.
#pragma once

namespace moegguf::kernels {

enum class Instructions { upstream, avx2, avx512 };

// The best ones; fewer where MOEGGUF_KERNELS says upstream or avx2, to compare.
Instructions instructions();

} // namespace moegguf::kernels
