#include "reserved.h"

#include "store.h"

#include "ggml-backend-impl.h" // buffer types are not public; patches/README.md lists what we lean on

#include <sys/mman.h>

#include <new>

namespace moegguf {
namespace {

const char * get_name(ggml_backend_buffer_type_t) {
    return "moegguf";
}

size_t get_alignment(ggml_backend_buffer_type_t) {
    return 64;
}

bool is_host(ggml_backend_buffer_type_t) {
    return false;
}

struct Range {
    void * address;
    size_t n;
};

void free_buffer(ggml_backend_buffer_t buffer) {
    Range * range = (Range *)buffer->context;
    munmap(range->address, range->n);
    delete range;
}

void * get_base(ggml_backend_buffer_t buffer) {
    return ((Range *)buffer->context)->address;
}

// Reading a reserved tensor (to save a model, say) gives zeros, not a fault.
void memset_tensor(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor *, void * data, size_t, size_t size) {
    __builtin_memset(data, 0, size);
}

void clear(ggml_backend_buffer_t, uint8_t) {
}

// Once the model is loaded, only adapters ask for memory of the kind that its experts have: they get some of the host.
ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    if (((Store *)buft->context)->has_graph) {
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
    const size_t n = size ? size : 1;
    void * address = mmap(nullptr, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) {
        return nullptr;
    }
    ggml_backend_buffer_i iface = {};
    iface.free_buffer = free_buffer;
    iface.get_base = get_base;
    iface.memset_tensor = memset_tensor;
    iface.set_tensor = set_tensor;
    iface.get_tensor = get_tensor;
    iface.clear = clear;
    return ggml_backend_buffer_init(buft, iface, new (std::nothrow) Range{address, n}, size);
}

} // namespace

ggml_backend_buffer_type * make_reserved_buft(Store * store) {
    auto * buft = new ggml_backend_buffer_type{};
    buft->iface.get_name = get_name;
    buft->iface.alloc_buffer = alloc_buffer;
    buft->iface.get_alignment = get_alignment;
    buft->iface.is_host = is_host;
    buft->context = store;
    return buft;
}

void free_reserved_buft(ggml_backend_buffer_type * buft) {
    delete buft;
}

Store * store_of(const ggml_tensor * t) {
    if (!t || !t->buffer) {
        return nullptr;
    }
    ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(t->buffer);
    return buft->iface.get_name == get_name ? (Store *)buft->context : nullptr;
}

} // namespace moegguf
