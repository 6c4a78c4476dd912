// nodes.h: the nodes of llama.cpp's graph that the eval callback stops at, by name, as patches/slot-ids.patch has them.
#pragma once

#include "ggml.h"

#include <cstdlib>
#include <cstring>

namespace moegguf {

constexpr char ids_node[] = "ffn_moe_slot_ids-";    // expert ids become slot ids here
constexpr char ready_node[] = "ffn_moe_ready_ids-"; // the same ids: what follows multiplies with gate and up
constexpr char down_node[] = "ffn_moe_down_in-";    // what follows multiplies with down

// Whether it may be one of them: asked of every node of a pass.
inline bool is_of_experts(const ggml_tensor * t) {
    return memcmp(t->name, "ffn_moe_", 8) == 0;
}

// The layer in the node's name when it starts with the prefix, -1 otherwise.
template <size_t n>
int layer_of(const ggml_tensor * t, const char (&prefix)[n]) {
    static_assert(n <= sizeof(t->name));
    return memcmp(t->name, prefix, n - 1) == 0 ? atoi(t->name + n - 1) : -1;
}

} // namespace moegguf
