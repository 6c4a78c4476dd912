// interleave.h: expert rows from the file's layout into the one that the CPU's kernels multiply with, past the cache.
// It may write the memory of the slot that it is given. Knows no pool.
#pragma once

#include "layout.h"

#include "ggml.h"

namespace moegguf {

constexpr uintptr_t uncached_alignment = 16; // of what is written past the cache

// Interleaves n_rows rows of n_cols values from `rows` (the file's layout) into `out`, aligned.
using Interleave = void (*)(uint8_t * out, const uint8_t * rows, int64_t n_rows, int64_t n_cols);

// The function that lays out a tensor's rows just as its buffer type does, in less time; nullptr: there is none. Asked
// once per matrix: upstream's chooses by type, shape and processor, so both do a few random rows, which are compared.
// `slot` describes one expert [ne0, ne1], allocated in that buffer type; it is not written.
Interleave find_interleave(const ggml_tensor & slot);

} // namespace moegguf
