// graph.cpp: what a managed layer adds to llama.cpp's graph, and the order of its nodes. It may add and move nodes. It
// changes no tensor's numbers, and knows no slot.
#include "nodes.h"
#include "reserved.h"
#include "store.h"

#include "ggml-impl.h" // ggml_cgraph is not public; patches/README.md lists what we lean on

#include <algorithm>

namespace moegguf {
namespace {

// Slot ids of a layer whose experts can be missing when they are computed.
bool starts_wait(const ggml_tensor * t) {
    return t->op == GGML_OP_CONT && t->op_params[waits_word] && layer_of(t, ids_node) >= 0;
}

const ggml_tensor * memory_of(const ggml_tensor * t) { return t->view_src ? t->view_src : t; }

// Which tensors of a graph the nodes that are put behind others make, write and read. Forgets them at each layer.
class Delayed {
  public:
    explicit Delayed(const ggml_cgraph & graph)
        : graph_(graph),
          made_(graph.visited_hash_set.size, 0),
          written_(made_),
          read_(made_) {}

    void start_layer(const ggml_tensor * ids) {
        layer_ += 1;
        made_[index(ids)] = layer_;
    }

    void add(const ggml_tensor * t) {
        made_[index(t)] = layer_;
        if (ggml_op_is_empty(t->op)) { // a view: names memory, and touches none
            return;
        }
        written_[index(memory_of(t))] = layer_;
        for (const ggml_tensor * source : t->src) {
            if (source) { read_[index(memory_of(source))] = layer_; }
        }
    }

    // Whether the node needs what one of them makes, reads what one writes, or writes what one reads.
    bool must_follow(const ggml_tensor * t) const {
        const bool touches = !ggml_op_is_empty(t->op);
        if (touches && t->view_src && (has(written_, t->view_src) || has(read_, t->view_src))) { return true; }
        return std::any_of(std::begin(t->src), std::end(t->src), [&](const ggml_tensor * source) {
            return source && (has(made_, source) || (touches && has(written_, memory_of(source))));
        });
    }

  private:
    size_t index(const ggml_tensor * t) const { return ggml_hash_find(&graph_.visited_hash_set, t); }
    bool has(const std::vector<int> & marks, const ggml_tensor * t) const { return marks[index(t)] == layer_; }

    const ggml_cgraph & graph_;
    std::vector<int> made_; // the layer that last marked a tensor
    std::vector<int> written_;
    std::vector<int> read_;
    int layer_ = 1;
};

} // namespace
} // namespace moegguf

using namespace moegguf;

extern "C" ggml_tensor * moegguf_slot_ids(ggml_context * ctx, const ggml_tensor * w, ggml_tensor * expert_ids,
                                          ggml_tensor * weights, ggml_tensor * input, int il) {
    Store * store = store_of(w);
    if (!store) { return nullptr; }
    store->has_graph = true;
    ggml_tensor * ids = ggml_cont(ctx, expert_ids);
    ggml_format_name(ids, "%s%d", ids_node, il);
    ids->src[1] = weights; // computed before, and still there when the hook reads them
    ids->src[2] = input;
    if (store->arrivals.on(il)) { // ids that the scheduler copies from another device are not those of the hook
        ids->src[3] = store->tiers.on_cpu->pool()->cpu_anchor();
    }
    ids->op_params[waits_word] = !store->tiers.of(il).numbering.resident();
    return ids;
}

extern "C" ggml_tensor * moegguf_ready_ids(ggml_context * ctx, ggml_tensor * ids, int il) {
    ggml_tensor * ready = ggml_reshape_2d(ctx, ids, ids->ne[0], ids->ne[1]);
    ggml_format_name(ready, "%s%d", ready_node, il);
    return ready;
}

extern "C" void moegguf_order_nodes(ggml_cgraph * graph) {
    Delayed delayed(*graph);
    std::vector<ggml_tensor *> behind; // of the layer that the scan is in
    int n = 0;
    const auto end_layer = [&] {
        std::copy(behind.begin(), behind.end(), graph->nodes + n);
        n += (int)behind.size();
        behind.clear();
    };
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor * t = graph->nodes[i];
        if (starts_wait(t)) {
            end_layer();
            delayed.start_layer(t);
        } else if (delayed.must_follow(t)) {
            delayed.add(t);
            behind.push_back(t);
            continue;
        }
        graph->nodes[n++] = t;
    }
    end_layer();
}
