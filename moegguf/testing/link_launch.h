// link_launch.h: copies a graph when the graph is launched on a simulated device (link_device.cpp). The copy contains
// the operations, parameters, shapes and addresses of that moment, like a launch of CUDA kernels. Some launches only
// repeat an earlier launch, under conditions like those in ggml's CUDA backend (ggml_backend_cuda_graph_compute). This
// file knows nothing about devices, and computes nothing.
#pragma once

#include "ggml-backend-impl.h" // ggml_backend_buffer is not part of llama.cpp's public API (see patches/README.md)
#include "ggml-impl.h"         // ggml_cgraph is not part of the public API either

#include <cstring>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

namespace moegguf {

// Copies of the nodes of a graph and of their sources. Later changes to the originals do not affect the copies.
class Launch {
  public:
    explicit Launch(const ggml_cgraph & graph)
        : uses_(ggml_hash_set_new((size_t)graph.n_nodes * 2)),
          use_counts_(uses_.size, 0) {
        for (int i = 0; i < graph.n_nodes; i++) {
            const ggml_tensor * node = graph.nodes[i];
            ggml_tensor * copied = copy(node);
            for (int j = 0; j < GGML_MAX_SRC; j++) { copied->src[j] = node->src[j] ? copy(node->src[j]) : nullptr; }
            nodes_.push_back(copied);
            use_counts_[ggml_hash_find_or_insert(&uses_, copied)] = ggml_node_get_use_count(&graph, i);
        }
    }
    ~Launch() { ggml_hash_set_free(&uses_); }
    Launch(const Launch &) = delete;
    Launch & operator=(const Launch &) = delete;

    int n_nodes() const { return (int)nodes_.size(); }
    const ggml_tensor * node(int i) const { return nodes_[i]; }

    // Returns nodes [first, end) as a graph that a backend can compute. The graph points into this object.
    ggml_cgraph part(int first, int end) {
        ggml_cgraph graph = {};
        graph.n_nodes = end - first;
        graph.nodes = nodes_.data() + first;
        graph.use_counts = use_counts_.data();
        graph.visited_hash_set = uses_;
        return graph;
    }

    // Returns the end of the buffer that contains a weight. Returns nullptr if the tensor is not a weight, or is a
    // view.
    const uint8_t * end_of_weights(const ggml_tensor * copied) const {
        const auto found = ends_of_weights_.find(copied);
        return found == ends_of_weights_.end() ? nullptr : found->second;
    }

  private:
    ggml_tensor * copy(const ggml_tensor * t) {
        ggml_tensor *& known = copies_[t];
        if (known) { return known; }
        known = &memory_.emplace_back(*t);
        if (!t->view_src && t->buffer && t->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
            ends_of_weights_[known] = (const uint8_t *)ggml_backend_buffer_get_base(t->buffer) + t->buffer->size;
        }
        known->buffer = nullptr; // the buffer may be freed before the copy is computed
        std::fill(std::begin(known->src), std::end(known->src), nullptr);
        return known;
    }

    std::deque<ggml_tensor> memory_;
    std::vector<ggml_tensor *> nodes_;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies_; // key: the original
    std::unordered_map<const ggml_tensor *, const uint8_t *> ends_of_weights_;
    ggml_hash_set uses_;
    std::vector<int32_t> use_counts_; // kernels that compute two nodes at once read these
};

// The launches of one stream. A graph is identified by its first node. When a launch finds the graph unchanged since
// the last launch, its copy is kept, and later launches repeat it until the graph changes. A graph with the same uid
// (not 0) as at its last launch is treated as unchanged. Any other graph is treated as changed if any of its nodes has
// changed.
class Launches {
  public:
    // Returns the launch to compute for this graph; nullptr: the graph has the uid of a graph with a different number
    // of nodes.
    std::shared_ptr<Launch> launch(const ggml_cgraph & graph) {
        Known & known = known_[graph.nodes[0]];
        if (graph.uid != 0 && graph.uid == known.uid && (int)known.properties.size() != graph.n_nodes) {
            return nullptr;
        }
        const bool changed = update(known, graph);
        if (changed || !known.settled) {
            auto fresh = std::make_shared<Launch>(graph);
            known.settled = !changed;
            if (known.settled) { known.repeated = fresh; }
            return fresh;
        }
        n_replays_ += 1;
        return known.repeated;
    }

    uint64_t n_replays() const { return n_replays_; }

  private:
    struct Properties {
        ggml_tensor node;
        struct {
            const void * data;
            int64_t ne[GGML_MAX_DIMS];
            size_t nb[GGML_MAX_DIMS];
        } sources[GGML_MAX_SRC];
    };

    struct Known {
        uint64_t uid = 0;
        bool settled = false; // true: launched twice without a change in between, so `repeated` is launched again
        std::vector<Properties> properties;
        std::shared_ptr<Launch> repeated;
    };

    static void describe(const ggml_tensor * node, Properties & out) {
        memset((void *)&out, 0, sizeof(out)); // memcmp compares the bytes between fields, too
        memcpy((void *)&out.node, node, sizeof(out.node));
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            const ggml_tensor * source = node->src[j];
            if (!source) { continue; }
            out.sources[j].data = source->data;
            memcpy(out.sources[j].ne, source->ne, sizeof(source->ne));
            memcpy(out.sources[j].nb, source->nb, sizeof(source->nb));
        }
    }

    // Returns true if the graph has changed since its last launch. Stores the graph's current properties.
    static bool update(Known & known, const ggml_cgraph & graph) {
        if (graph.uid != 0 && graph.uid == known.uid) { return false; }
        known.uid = graph.uid;
        bool changed = (int)known.properties.size() != graph.n_nodes;
        known.properties.resize(graph.n_nodes);
        for (int i = 0; i < graph.n_nodes; i++) {
            Properties now;
            describe(graph.nodes[i], now);
            if (changed || memcmp(&now, &known.properties[i], sizeof(now)) != 0) {
                memcpy((void *)&known.properties[i], &now, sizeof(now));
                changed = true;
            }
        }
        return changed;
    }

    std::unordered_map<const void *, Known> known_; // key: first node of a graph
    uint64_t n_replays_ = 0;
};

} // namespace moegguf
