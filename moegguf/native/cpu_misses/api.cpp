// api.cpp: the calls of the C ABI that belong to experts computed by the CPU.
#include "api.h"

using namespace moegguf;

extern "C" {

int moegguf_store_compute_misses(moegguf_store * store, int32_t n_threads) {
    return on(store, [&](Store & s) { s.slots.start(n_threads); });
}

int moegguf_store_sim_compute_misses(moegguf_store * store, double bytes_per_ns, double layer_ns) {
    return on(store, [&](Store & s) { s.slots.start_modelled(bytes_per_ns, layer_ns); });
}

int moegguf_store_computed(moegguf_store * store, moegguf_computed * computed) {
    return on(store, [&](Store & s) { s.slots.info(given(computed)); });
}

} // extern "C"
