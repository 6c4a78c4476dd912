// link_strict.h: checks CUDA's rules for the use of memory and kernels, for a strict simulated device
// (link_device.cpp). The padding after a weight must be zero, ids must exist, and memory must be allocated. This file
// computes with the CPU backend, and knows nothing about the device.
#pragma once

#include "link_launch.h"

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace moegguf {

constexpr int poison = 0xff; // memory filled with this byte holds NaN in nearly every number type, and ids of -1

// Ranges of memory that do not overlap. Any thread may call the functions.
class Ranges {
  public:
    void add(const void * base, size_t n) {
        std::lock_guard<std::mutex> lock(mutex_);
        ranges_[(const uint8_t *)base] = n;
    }

    void remove(const void * base) {
        std::lock_guard<std::mutex> lock(mutex_);
        ranges_.erase((const uint8_t *)base);
    }

    // Returns true if one range contains all of these bytes.
    bool contain(const void * data, size_t n) const {
        std::lock_guard<std::mutex> lock(mutex_);
        auto after = ranges_.upper_bound((const uint8_t *)data);
        return after != ranges_.begin() && std::prev(after)->first + std::prev(after)->second >= (uint8_t *)data + n;
    }

  private:
    mutable std::mutex mutex_;
    std::map<const uint8_t *, size_t> ranges_;
};

// Padding

constexpr int64_t row_padding = 512; // MATRIX_ROW_PADDING of ggml-cuda: kernels read rows in steps of 256 or 512 values

inline int64_t padding_values(const ggml_tensor * t) {
    const int64_t beyond = ggml_is_quantized(t->type) ? t->ne[0] % row_padding : 0;
    return beyond ? row_padding - beyond : 0;
}

// Returns the size of a tensor in bytes, with its padding. After its last row, a quantised tensor has padding, up to a
// multiple of 512 values.
inline size_t padded_bytes(const ggml_tensor * t) { return ggml_nbytes(t) + ggml_row_size(t->type, padding_values(t)); }

// Computes a launch on the CPU, and checks the rules. CUDA's kernels read beyond the last row of quantised weights. The
// bytes there have to be zeros, or the next expert of a tensor without gaps. Otherwise this class sets the products to
// NaN.
class StrictRun {
  public:
    StrictRun(ggml_backend_t cpu, Launch & launch, const Ranges & memory)
        : cpu_(cpu),
          launch_(launch),
          memory_(memory) {}

    // Returns a description of the first rule that the launch breaks; empty: none. A launch that touches memory that is
    // not allocated is not computed. After any other breach, nodes before the breach are computed. The contiguous
    // results of all other nodes are set to NaN.
    std::string run() {
        std::string why = find_freed();
        for (int i = 0; why.empty() && i < launch_.n_nodes(); i++) { why = take(i); }
        if (why.empty()) { return compute_before(launch_.n_nodes()); }
        for (int i = first_; i < launch_.n_nodes(); i++) { spoil_all(launch_.node(i)); }
        return why;
    }

    static int64_t id_at(const ggml_tensor * ids, int64_t i) {
        int64_t at[GGML_MAX_DIMS];
        ggml_unravel_index(ids, i, &at[0], &at[1], &at[2], &at[3]);
        const char * address = (const char *)ids->data;
        for (int d = 0; d < GGML_MAX_DIMS; d++) { address += at[d] * ids->nb[d]; }
        return ids->type == GGML_TYPE_I64 ? *(const int64_t *)address : *(const int32_t *)address;
    }

  private:
    // Checks node i, and computes it or earlier nodes if the check requires this. Other nodes are computed later,
    // together. Returns a description of the broken rule; empty: none.
    std::string take(int i) {
        const ggml_tensor * node = launch_.node(i);
        if (!is_computed(node)) { return {}; }
        std::string why;
        if (n_choices(node) || sorts(node)) {
            why = compute_before(i);
            if (why.empty()) { why = find_wrong_id(node); }
            if (why.empty() && sorts(node) && has_nan(node->src[0])) { // a sort with NaN might not end
                spoil_all(node);
                first_ = i + 1;
            }
        }
        if (why.empty() && reads_past_rows(node)) {
            why = compute_before(i + 1);
            spoil(node);
        }
        return why;
    }

    std::string compute_before(int end) {
        ggml_cgraph part = launch_.part(first_, end);
        first_ = end;
        const bool done = part.n_nodes == 0 || ggml_backend_graph_compute(cpu_, &part) == GGML_STATUS_SUCCESS;
        return done ? "" : "the CPU could not compute a graph";
    }

    // Returns false for nodes that kernels skip. These are nodes that compute nothing (such as views), nodes without
    // elements, and nodes that the graph leaves out this time.
    static bool is_computed(const ggml_tensor * node) {
        return !ggml_op_is_empty(node->op) && !ggml_is_empty(node) && (node->flags & GGML_TENSOR_FLAG_COMPUTE);
    }

    // Memory

    std::string find_freed() const {
        for (int i = 0; i < launch_.n_nodes(); i++) {
            const ggml_tensor * node = launch_.node(i);
            if (!is_computed(node)) { continue; }
            if (!is_there(node)) { return name(node) + " writes memory that is not there"; }
            for (const ggml_tensor * source : node->src) {
                if (source && !is_there(source)) {
                    return name(node) + " reads memory that is not there: '" + source->name + "'";
                }
            }
        }
        return {};
    }

    bool is_there(const ggml_tensor * t) const { return ggml_is_empty(t) || memory_.contain(t->data, ggml_nbytes(t)); }

    void spoil_all(const ggml_tensor * node) const {
        if (is_computed(node) && is_there(node) && ggml_is_contiguous(node)) {
            memset(node->data, poison, ggml_nbytes(node));
        }
    }

    static std::string name(const ggml_tensor * node) {
        return std::string(ggml_op_name(node->op)) + " '" + node->name + "'";
    }

    // Ids

    static const ggml_tensor * ids_of(const ggml_tensor * node) {
        switch (node->op) {
            case GGML_OP_GET_ROWS:
            case GGML_OP_SET_ROWS:
                return node->src[1];
            case GGML_OP_MUL_MAT_ID:
            case GGML_OP_ADD_ID:
                return node->src[2];
            default:
                return nullptr;
        }
    }

    // Returns the number of rows or matrices from which the ids of a node choose; 0: the node has no ids.
    static int64_t n_choices(const ggml_tensor * node) {
        switch (node->op) {
            case GGML_OP_GET_ROWS:
                return node->src[0]->ne[1];
            case GGML_OP_SET_ROWS:
                return node->ne[1];
            case GGML_OP_MUL_MAT_ID:
                return node->src[0]->ne[2];
            case GGML_OP_ADD_ID:
                return node->src[1]->ne[1];
            default:
                return 0;
        }
    }

    static std::string find_wrong_id(const ggml_tensor * node) {
        const ggml_tensor * ids = ids_of(node);
        for (int64_t i = 0; ids && i < ggml_nelements(ids); i++) {
            const int64_t id = id_at(ids, i);
            if (id < 0 || id >= n_choices(node)) {
                return name(node) + " has the id " + std::to_string(id) + " of " + std::to_string(n_choices(node));
            }
        }
        return {};
    }

    static bool sorts(const ggml_tensor * node) { return node->op == GGML_OP_ARGSORT || node->op == GGML_OP_TOP_K; }

    static bool has_nan(const ggml_tensor * t) {
        const float * values = (const float *)t->data;
        return std::any_of(values, values + ggml_nelements(t), [](float value) { return std::isnan(value); });
    }

    // Rows

    bool reads_past_rows(const ggml_tensor * node) const {
        const bool multiplies = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
        return multiplies && padding_values(node->src[0]) > 0 && launch_.end_of_weights(node->src[0]);
    }

    // Returns true if kernels would read garbage after the last row of matrix number `matrix` of `w`.
    bool finds_garbage(const ggml_tensor * w, int64_t matrix) const {
        const int64_t n = padding_values(w);
        const uint8_t * behind = (const uint8_t *)w->data + matrix * w->nb[2] + w->ne[1] * w->nb[1];
        const uint8_t * end = behind + ggml_row_size(w->type, n);
        if (end > launch_.end_of_weights(w)) { return true; }
        if (matrix + 1 == w->ne[2] || w->nb[2] != w->ne[1] * w->nb[1]) {
            return std::any_of(behind, end, [](uint8_t byte) { return byte != 0; });
        }
        std::vector<float> values(n);
        ggml_get_type_traits(w->type)->to_float(behind, values.data(), n);
        return !std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
    }

    // Sets results to NaN if there is garbage after the last row of their matrix.
    void spoil(const ggml_tensor * product) const {
        const ggml_tensor *w = product->src[0], *ids = product->src[2];
        char * out = (char *)product->data;
        if (product->op == GGML_OP_MUL_MAT) {
            if (finds_garbage(w, w->ne[2] - 1)) { memset(out, poison, ggml_nbytes(product)); }
            return;
        }
        for (int64_t token = 0; token < ids->ne[1]; token++) {
            for (int64_t i = 0; i < ids->ne[0]; i++) {
                if (finds_garbage(w, id_at(ids, token * ids->ne[0] + i))) {
                    memset(out + token * product->nb[2] + i * product->nb[1], poison, product->nb[1]);
                }
            }
        }
    }

    ggml_backend_t cpu_;
    Launch & launch_;
    const Ranges & memory_;
    int first_ = 0; // first node that has not been computed yet
};

} // namespace moegguf
