// router_scores.cpp: implements router_scores.h.
#include "router_scores.h"

#include <algorithm>

namespace moegguf {
namespace {

// Returns the values of a contiguous tensor as a view with one dimension of 32-bit integers, with the same bits.
ggml_tensor * flat_bits(ggml_context * ctx, ggml_tensor * t) {
    ggml_tensor * flat = ggml_view_1d(ctx, t, ggml_nelements(t), 0);
    flat->type = GGML_TYPE_I32;
    return flat;
}

} // namespace

int RouterScores::n_layers(int il, const ggml_tensor * input, int window, ggml_backend_dev_t device) const {
    const auto & layers = layout_.moe_layers;
    const int row = layout_.row_of[il], n = std::min(window, (int)layers.size() - 1 - row);
    for (int at = row + 1; at <= row + n; at++) {
        const ggml_tensor * router = routers_[layers[at]];
        const bool fits = router && router->buffer && router->ne[0] == input->ne[0] &&
                          router->ne[1] == layout_.layers[layers[at]].n_expert && ggml_nrows(router) == router->ne[1];
        if (!fits || ggml_backend_buft_get_device(ggml_backend_buffer_get_type(router->buffer)) != device) { return 0; }
    }
    return n;
}

ggml_tensor * RouterScores::join(ggml_context * ctx, ggml_tensor * expert_ids, ggml_tensor * input, int il, int n,
                                 ggml_backend_dev_t device) const {
    ggml_tensor * ids = ggml_is_contiguous(expert_ids) ? expert_ids : ggml_cont(ctx, expert_ids);
    ggml_tensor * joined = flat_bits(ctx, ids);
    for (int at = layout_.row_of[il] + 1; n > 0; at++, n--) {
        ggml_tensor * scores = ggml_mul_mat(ctx, routers_[layout_.moe_layers[at]], input);
        joined = ggml_concat(ctx, joined, flat_bits(ctx, scores), 0);
    }
    if (!ggml_backend_dev_supports_op(device, joined)) { return nullptr; }
    return ggml_view_2d(ctx, joined, expert_ids->ne[0], expert_ids->ne[1], expert_ids->ne[0] * sizeof(int32_t), 0);
}

} // namespace moegguf
