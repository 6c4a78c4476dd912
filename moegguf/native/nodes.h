// nodes.h: the nodes of llama.cpp's graph that the eval callback stops at, by name, as patches/slot-ids.patch has them,
// and one word that
// they carry. Knows no store.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdlib>
#include <cstring>
#include <vector>

namespace moegguf {

constexpr char ids_node[] = "ffn_moe_slot_ids-";    // expert ids become slot ids here
constexpr char ready_node[] = "ffn_moe_ready_ids-"; // the same ids: what follows multiplies with gate and up
constexpr char down_node[] = "ffn_moe_down_in-";    // what follows multiplies with down

// Whether it may be one of them: asked of every node of a pass.
inline bool is_of_experts(const ggml_tensor * t) { return memcmp(t->name, "ffn_moe_", 8) == 0; }

// The layer in the node's name when it starts with the prefix, -1 otherwise.
template <size_t n>
int layer_of(const ggml_tensor * t, const char (&prefix)[n]) {
    static_assert(n <= sizeof(t->name));
    return memcmp(t->name, prefix, n - 1) == 0 ? atoi(t->name + n - 1) : -1;
}

constexpr int waits_word = 0; // of op_params of the node of slot ids: whether experts may be missing

// The floats of a tensor: in place where they lie in host memory, copied to `scratch` where not. NULL when the
// tensor does not hold n of them in a row.
inline const float * floats(const ggml_tensor * t, size_t n, std::vector<float> & scratch) {
    if (!t || t->type != GGML_TYPE_F32 || !ggml_is_contiguous(t) || (size_t)ggml_nelements(t) != n || !t->buffer) {
        return nullptr;
    }
    if (ggml_backend_buffer_is_host(t->buffer)) { return (const float *)t->data; }
    scratch.resize(n);
    ggml_backend_tensor_get(t, scratch.data(), 0, n * sizeof(float));
    return scratch.data();
}

} // namespace moegguf
