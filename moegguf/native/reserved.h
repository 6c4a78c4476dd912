// reserved.h: buffers that have addresses but no memory, for tensors that stay in the model's files.
#pragma once

#include "ggml-backend-impl.h" // defines buffers; patches/README.md lists the internals that we use

#include <sys/mman.h>

#include <cstring>

namespace moegguf {

inline size_t mapped_bytes(size_t size) { return size ? size : 1; }

// Reserves address space without memory. ggml's writes to the buffer are ignored, and ggml's reads from it return zeros
// (for example if the model is saved). Returns nullptr if the system refuses.
inline ggml_backend_buffer_t reserve_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void * address = mmap(nullptr, mapped_bytes(size), PROT_NONE, flags, -1, 0);
    if (address == MAP_FAILED) { return nullptr; }
    ggml_backend_buffer_i iface = {};
    iface.free_buffer = [](ggml_backend_buffer_t buffer) { munmap(buffer->context, mapped_bytes(buffer->size)); };
    iface.get_base = [](ggml_backend_buffer_t buffer) { return buffer->context; };
    iface.memset_tensor = [](ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {};
    iface.set_tensor = [](ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {};
    iface.get_tensor = [](ggml_backend_buffer_t, const ggml_tensor *, void * data, size_t, size_t n) {
        memset(data, 0, n);
    };
    iface.clear = [](ggml_backend_buffer_t, uint8_t) {};
    return ggml_backend_buffer_init(buft, iface, address, size);
}

} // namespace moegguf
