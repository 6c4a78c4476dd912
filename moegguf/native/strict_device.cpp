#include "strict_device.h"

#include "ggml-backend-impl.h" // patches/README.md lists what we lean on
#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace moegguf {
namespace {

constexpr int64_t row_padding = 512; // MATRIX_ROW_PADDING of ggml-cuda; its kernels take rows in steps of 256 or 512

int64_t padding_values(const ggml_tensor * t) {
    const int64_t beyond = ggml_is_quantized(t->type) ? t->ne[0] % row_padding : 0;
    return beyond ? row_padding - beyond : 0;
}

bool reads_past_rows(const ggml_tensor * node, ggml_backend_buffer_type_t memory) {
    if (node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID) { return false; }
    const ggml_tensor * w = node->src[0];
    return padding_values(w) > 0 && !w->view_src && w->buffer && w->buffer->buft == memory &&
           w->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// Behind the last row of one matrix.
bool finds_garbage(const ggml_tensor * w, int64_t matrix) {
    const int64_t n = padding_values(w);
    const uint8_t * behind = (const uint8_t *)w->data + matrix * w->nb[2] + w->ne[1] * w->nb[1];
    const uint8_t * end = behind + ggml_row_size(w->type, n);
    if (end > (const uint8_t *)ggml_backend_buffer_get_base(w->buffer) + w->buffer->size) { return true; }
    if (matrix + 1 == w->ne[2] || w->nb[2] != w->ne[1] * w->nb[1]) {
        return std::any_of(behind, end, [](uint8_t byte) { return byte != 0; });
    }
    std::vector<float> values(n);
    ggml_get_type_traits(w->type)->to_float(behind, values.data(), n);
    return !std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
}

// What comes of such a matrix is NaN.
void spoil(const ggml_tensor * product) {
    const ggml_tensor *w = product->src[0], *ids = product->src[2];
    char * out = (char *)product->data;
    if (product->op == GGML_OP_MUL_MAT) {
        if (finds_garbage(w, w->ne[2] - 1)) { memset(out, 0xff, ggml_nbytes(product)); }
        return;
    }
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t i = 0; i < ids->ne[0]; i++) {
            const char * id = (const char *)ids->data + token * ids->nb[1] + i * ids->nb[0];
            if (finds_garbage(w, *(const int32_t *)id)) {
                memset(out + token * product->nb[2] + i * product->nb[1], 0xff, product->nb[1]);
            }
        }
    }
}

} // namespace

size_t padded_bytes(const ggml_tensor * t) { return ggml_nbytes(t) + ggml_row_size(t->type, padding_values(t)); }

void zero_padding(ggml_backend_buffer_t buffer, const ggml_tensor * t) {
    if (!t->view_src && buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        memset((char *)t->data + ggml_nbytes(t), 0, padded_bytes(t) - ggml_nbytes(t));
    }
}

ggml_status compute_strictly(ggml_backend_t cpu, ggml_cgraph * graph, ggml_backend_buffer_type_t memory) {
    for (int first = 0, last = 0; last < graph->n_nodes; last++) {
        const ggml_tensor * node = graph->nodes[last];
        const bool reads_past = reads_past_rows(node, memory);
        if (!reads_past && last + 1 < graph->n_nodes) { continue; }
        ggml_cgraph part = ggml_graph_view(graph, first, last + 1);
        const ggml_status status = ggml_backend_graph_compute(cpu, &part);
        if (status != GGML_STATUS_SUCCESS) { return status; }
        if (reads_past) { spoil(node); }
        first = last + 1;
    }
    return GGML_STATUS_SUCCESS;
}

} // namespace moegguf
