// nodes.h: the nodes of llama.cpp's graph that the eval callback stops at, by name, as patches/slot-ids.patch has them.
#pragma once

#include "ggml.h"

#include <cstdlib>
#include <cstring>

namespace moegguf {

constexpr char ids_node[] = "ffn_moe_slot_ids-";    // expert ids become slot ids here
constexpr char ready_node[] = "ffn_moe_ready_ids-"; // the same ids: what follows multiplies with gate and up
constexpr char down_node[] = "ffn_moe_down_in-";    // what follows multiplies with down

// The layer in the node's name when it starts with the prefix, -1 otherwise.
template <size_t n>
int layer_of(const ggml_tensor * t, const char (&prefix)[n]) {
    return strncmp(t->name, prefix, n - 1) == 0 ? atoi(t->name + n - 1) : -1;
}

} // namespace moegguf
