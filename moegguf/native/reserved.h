// reserved.h: a buffer type that only reserves address space, where llama.cpp believes its expert tensors to be.
// Nothing may read or write there. Knows of a store only its address.
#pragma once

#include "ggml-backend.h"

namespace moegguf {

class Store;

ggml_backend_buffer_type * make_reserved_buft(Store * store);
void free_reserved_buft(ggml_backend_buffer_type * buft);

// The store that keeps this tensor's experts, or nullptr for a tensor with memory of its own.
Store * store_of(const ggml_tensor * t);

} // namespace moegguf
