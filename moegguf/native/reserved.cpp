#include "reserved.h"

#include "store.h"

#include "ggml-backend-impl.h" // buffer types are not public; patches/README.md lists what we lean on

#include <sys/mman.h>

#include <cstring>

namespace moegguf {
namespace {

const char * get_name(ggml_backend_buffer_type_t) { return "moegguf"; }

size_t mapped_bytes(size_t size) { return size ? size : 1; }

// Once the model is loaded, only adapters ask for memory of the kind that its experts have: they get some of the host.
// Reading a reserved tensor (to save a model, say) gives zeros, not a fault.
ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    if (((Store *)buft->context)->has_graph) {
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
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

} // namespace

ggml_backend_buffer_type * make_reserved_buft(Store * store) {
    auto * buft = new ggml_backend_buffer_type{};
    buft->iface.get_name = get_name;
    buft->iface.alloc_buffer = alloc_buffer;
    buft->iface.get_alignment = [](ggml_backend_buffer_type_t) { return (size_t)64; };
    buft->iface.is_host = [](ggml_backend_buffer_type_t) { return false; };
    buft->context = store;
    return buft;
}

void free_reserved_buft(ggml_backend_buffer_type * buft) { delete buft; }

Store * store_of(const ggml_tensor * t) {
    if (!t || !t->buffer) { return nullptr; }
    ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(t->buffer);
    return buft->iface.get_name == get_name ? (Store *)buft->context : nullptr;
}

} // namespace moegguf
