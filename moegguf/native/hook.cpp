// hook.cpp: functions that the patched llama.cpp calls for expert tensors.
// - While a model loads, its expert tensors get a buffer type that only reserves address space.
// - While a graph is built, the hook adds nodes to layers whose experts a store holds, and reorders the nodes.
// - While a graph runs, the scheduler's eval callback stops at a layer's expert ids, and the experts are acquired. It
//   also stops before multiplications whose matrices are on their way, if kernels cannot wait for them (arrivals.cpp).
//   At such a stop, the supply waits for the matrices.
//
// A layer needs no stop in two cases:
// - Every expert of the layer's tier is complete in its own slot, and neither a listener nor moegguf_store_watch()
//   needs routing events. Such a layer is idle (Store::idle).
// - The device looks up the layer's slot ids itself (mapped.h).
//
// The hook may add and move nodes. It replaces the expert ids of a node with the slot ids from Store::acquire(). It
// does not change slots itself.
#include "reserved.h"
#include "store.h"

#include "ggml-impl.h" // defines ggml_cgraph

#include <algorithm>
#include <cstdlib>
#include <cstring>

// patches/scheduler.patch adds this function to ggml-backend.cpp. The symbol is weak, because `moegguf bench --against
// stock` loads this library together with an unpatched llama.cpp, which never calls moegguf_set_scheduler.
extern "C" __attribute__((weak)) void ggml_backend_sched_set_callback_version(ggml_backend_sched_t sched,
                                                                              const uint64_t * version);

namespace moegguf {
namespace {

// The reserved buffer type. Its buffers have addresses but no memory, so no kernel may read or write there.

const char * get_name(ggml_backend_buffer_type_t) { return "moegguf"; }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    ((Store *)buft->context)->router_scores.forget(); // a model is loaded, which has its own routers
    return reserve_buffer(buft, size);
}

// Returns the store that holds this tensor's experts; nullptr: no store holds them.
Store * store_of(const ggml_tensor * t) {
    if (!t || !t->buffer) { return nullptr; }
    ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(t->buffer);
    return buft->iface.get_name == get_name ? (Store *)buft->context : nullptr;
}

// Name prefixes of the nodes at which the callback acts. The layer's number follows the prefix. The name for `down` is
// also in patches/slot-ids.patch.

constexpr char ids_node[] = "ffn_moe_slot_ids-";    // expert ids become slot ids here
constexpr char ready_node[] = "ffn_moe_ready_ids-"; // a view of the slot ids, before the gate and up nodes
constexpr char down_node[] = "ffn_moe_down_in-";    // the input of the node that multiplies by down
// The router's ids, if the layer's matrix multiplications use them instead of slot ids; the callback does not stop
// here.
constexpr char own_ids_node[] = "ffn_moe_own_ids-";
// The router's ids in the log, if the device looks up the slot ids (mapped.h); the callback does not stop here.
constexpr char log_ids_node[] = "ffn_moe_log_ids-";

// Returns true if the node's name starts with the common part of these prefixes. The test is cheap, because it runs at
// every node.
bool is_of_experts(const ggml_tensor * t) { return memcmp(t->name, "ffn_moe_", 8) == 0; }

// Returns the number of the layer in the node's name if the name begins with the prefix; otherwise -1.
template <size_t n>
int layer_of(const ggml_tensor * t, const char (&prefix)[n]) {
    static_assert(n <= sizeof(t->name));
    return memcmp(t->name, prefix, n - 1) == 0 ? atoi(t->name + n - 1) : -1;
}

// Indices into the op_params of a slot-id node. The words before them hold the offset of a view.
constexpr int waits_word = 2;  // the word is 0 if each expert of the layer's tier has its own slot, else 1
constexpr int scores_word = 3; // the word is the number of later layers whose routers' scores follow the ids in memory

void synchronize(ggml_backend_t backend) {
    if (backend) { ggml_backend_synchronize(backend); }
}

// Returns the floats of a tensor, or NULL when it does not have n consecutive floats in a buffer. Floats in host memory
// are returned in place. Other floats are copied to `scratch`, possibly in the backend's stream, so the caller must
// synchronize the backend before it reads them.
const float * floats(const ggml_tensor * t, size_t n, ggml_backend_t backend, std::vector<float> & scratch) {
    if (!t || t->type != GGML_TYPE_F32 || !ggml_is_contiguous(t) || (size_t)ggml_nelements(t) != n || !t->buffer) {
        return nullptr;
    }
    if (ggml_backend_buffer_is_host(t->buffer)) { return (const float *)t->data; }
    scratch.resize(n);
    if (backend && ggml_backend_supports_buft(backend, ggml_backend_buffer_get_type(t->buffer))) {
        ggml_backend_tensor_get_async(backend, t, scratch.data(), 0, n * sizeof(float));
    } else {
        synchronize(backend);
        ggml_backend_tensor_get(t, scratch.data(), 0, n * sizeof(float));
    }
    return scratch.data();
}

// Functions that change a graph.

// Returns the number of later layers whose routers' scores the graph of layer il should compute; 0: none. Scores are
// computed only in passes of a few tokens, which compute from slots on a device.
int scored_layers(const Store & store, int il, const ggml_tensor * input) {
    const int window = store.context.scored_layers, n_tokens = (int)input->ne[1];
    const Tier & tier = store.tiers.of(il);
    const bool in_slots = &tier != store.tiers.on_cpu && &store.tiers.of(il, n_tokens) == &tier;
    if (window == 0 || !in_slots || !store.forecaster.wants_inputs(n_tokens)) { return 0; }
    return store.router_scores.n_layers(il, input, window, tier.pool()->memory().device);
}

const ggml_tensor * memory_of(const ggml_tensor * t) { return t->view_src ? t->view_src : t; }

// The tensors that a layer's delayed nodes produce, write and read. A node is delayed if it must follow the layer's
// slot ids or another delayed node (must_follow). Delayed nodes are moved to the end of the layer, just before the next
// layer's slot ids.
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
        if (ggml_op_is_empty(t->op)) { // the node is a view, which neither reads nor writes memory
            return;
        }
        written_[index(memory_of(t))] = layer_;
        for (const ggml_tensor * source : t->src) {
            if (source) { read_[index(memory_of(source))] = layer_; }
        }
    }

    // Returns true if the node must stay after the layer's slot ids or after a delayed node. Such a node has one of
    // them as a source, reads memory that a delayed node writes, or writes through a view into memory that a delayed
    // node uses.
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
    std::vector<int> made_; // value of layer_ when the tensor was last marked as slot ids, or as made by a delayed node
    std::vector<int> written_;
    std::vector<int> read_;
    int layer_ = 1;
};

// Functions for the nodes at which the callback stops.

// Returns the kinds of matrices to wait for once this node has been computed, one bit per kind; 0: no wait.
uint8_t kinds_after(const Context & context, const ggml_tensor * t) {
    const int ready_il = layer_of(t, ready_node), il = ready_il >= 0 ? ready_il : layer_of(t, down_node);
    if (!context.store.layout.has_experts(il) || context.store.streamed->computes_on_arrival(il)) { return 0; }
    return ready_il >= 0 ? all_kinds & ~down_kind : down_kind;
}

// Returns the backend that computes the node; nullptr: the scheduler is not known. In that case, the node's work has
// already ended.
ggml_backend_t backend_of(const Context & context, const ggml_tensor * t) {
    return context.scheduler ? ggml_backend_sched_get_tensor_backend(context.scheduler, (ggml_tensor *)t) : nullptr;
}

// Returns true if the scheduler has to stop after this node. Counts the routing event of a layer that needs no stop.
bool must_stop(Context & context, const ggml_tensor * t) {
    if (!is_of_experts(t)) { return false; }
    if (const int own_il = layer_of(t, own_ids_node); own_il >= 0) {
        context.store.pass_over(own_il, (int)t->ne[0], (int)t->ne[1]);
        return false;
    }
    if (const int log_il = layer_of(t, log_ids_node); log_il >= 0) {
        context.store.pass_mapped({log_il, (int)t->ne[0], (int)t->ne[1]}, backend_of(context, t));
        return false;
    }
    const int il = layer_of(t, ids_node);
    if (il >= 0) {
        const bool idle = context.store.idle(il);
        if (idle) { context.store.count_idle(il, (int)t->ne[0], (int)t->ne[1]); }
        return !idle;
    }
    const uint8_t kinds = kinds_after(context, t);
    return kinds && !context.failed() && !context.store.shared.forked() && context.pinned.pending(kinds);
}

// Returns true if the forecaster needs the router's input for this choice. It does not need the input if it gets
// scores, nor in the last layer with experts.
bool forecast_needs_input(const Store & store, const Choice & choice) {
    const bool is_last = choice.il == store.layout.moe_layers.back();
    return store.forecaster.wants_inputs(choice.n_tokens) && !choice.scores && !is_last;
}

// Sets the router's weights and inputs in `choice`, if an observer needs them. Both tensors are sources of the node `t`
// (moegguf_slot_ids).
void read_details(Context & context, const ggml_tensor * t, ggml_backend_t backend, Choice & choice) {
    const Store & store = context.store;
    if (store.events.wants_weights()) {
        const size_t n = (size_t)choice.n_expert_used * choice.n_tokens;
        choice.weights = floats(t->src[1], n, backend, context.weights);
    }
    const int n_tokens = choice.n_tokens;
    if ((store.events.wants_inputs(n_tokens) || forecast_needs_input(store, choice)) && t->src[2]) {
        choice.n_embd = (int)t->src[2]->ne[0];
        choice.inputs = floats(t->src[2], (size_t)choice.n_embd * n_tokens, backend, context.inputs);
    }
}

// Returns `backend` if its stream runs on the device of the tier's slots and can itself wait for copies; otherwise
// nullptr.
ggml_backend_t stream_of(ggml_backend_t backend, const Tier & tier) {
    const Copies * copies = tier.copies;
    const bool waits = backend && copies && copies->has_events();
    return waits && ggml_backend_get_device(backend) == tier.pool()->memory().device ? backend : nullptr;
}

// Acquires the experts whose ids the node `t` has computed, and replaces the ids with slot ids. If the ids are in
// device memory, they are copied to the host and back. If the backend is known, its stream makes both copies, and this
// thread waits only for the copy to the host. The scores of later layers' routers are in the same copy.
void acquire_experts(Context & context, ggml_tensor * t, int il, ggml_backend_t backend) {
    Store & store = context.store;
    const bool in_place = ggml_backend_buffer_is_host(t->buffer);
    Choice choice = {il, (int32_t *)t->data, (int)t->ne[0], (int)t->ne[1]};
    const size_t n = (size_t)choice.n_expert_used * choice.n_tokens, n_bytes = n * sizeof(int32_t);
    if (n == 0) { return; }
    choice.wait_kinds = store.shared.has(MOEGGUF_OVERLAP) ? 0 : all_kinds;
    choice.ids_in_place = in_place;
    choice.stream = store.layout.has_experts(il) ? stream_of(backend, store.tiers.of(il)) : nullptr;
    const ggml_tensor * whole = t->op == GGML_OP_VIEW ? t->view_src : t; // the ids, and the scores if there are some
    if (!in_place) {
        const size_t n_whole = ggml_nbytes(whole);
        ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(t->buffer));
        choice.ids = context.ids.space(device, n_whole / sizeof(int32_t));
        backend ? ggml_backend_tensor_get_async(backend, whole, choice.ids, 0, n_whole)
                : ggml_backend_tensor_get(whole, choice.ids, 0, n_whole);
    }
    choice.n_scored = t->op_params[scores_word];
    if (choice.n_scored > 0) { choice.scores = (const float *)(choice.ids + n); }
    read_details(context, t, backend, choice);
    synchronize(backend);
    store.acquire(choice);
    if (!in_place) {
        backend ? ggml_backend_tensor_set_async(backend, t, choice.ids, 0, n_bytes)
                : ggml_backend_tensor_set(t, choice.ids, 0, n_bytes);
    }
}

// Handles a stop of the scheduler. Lets no exception escape, because the caller is C.
void stopped(Context & context, ggml_tensor * t) {
    const int il = layer_of(t, ids_node);
    ggml_backend_t backend = backend_of(context, t);
    try {
        if (il >= 0) {
            acquire_experts(context, t, il, backend);
        } else if (const uint8_t kinds = kinds_after(context, t); kinds && context.supply) {
            synchronize(backend);
            context.supply->wait(context, kinds);
        }
    } catch (const std::exception & e) {
        context.fail(MOEGGUF_MEMORY, e.what());
        if (il >= 0) {
            ggml_backend_tensor_memset(t, 0, 0, ggml_nbytes(t)); // valid slot ids, although the pass ends here
        }
    }
}

} // namespace

std::shared_ptr<ggml_backend_buffer_type> make_reserved_buft(Store * store) {
    auto buft = std::make_shared<ggml_backend_buffer_type>();
    buft->iface.get_name = get_name;
    buft->iface.alloc_buffer = alloc_buffer;
    buft->iface.get_alignment = [](ggml_backend_buffer_type_t) { return (size_t)64; };
    buft->iface.is_host = [](ggml_backend_buffer_type_t) { return false; };
    buft->context = store;
    return buft;
}

} // namespace moegguf

using namespace moegguf;

extern "C" bool moegguf_eval(ggml_tensor * t, bool ask, void * store) {
    Context & context = ((moegguf_store *)store)->store.context;
    if (ask) { return must_stop(context, t); }
    stopped(context, t);
    return true;
}

extern "C" bool moegguf_abort(void * store) { return ((moegguf_store *)store)->store.must_abort(); }

extern "C" void moegguf_set_scheduler(ggml_backend_sched_eval_callback eval, void * store, ggml_backend_sched_t sched) {
    if (eval != moegguf_eval) { return; }
    Store & of = ((moegguf_store *)store)->store;
    of.context.scheduler = sched;
    of.context.passed_over = of.passed_over();
    of.context.scored_layers = of.forecaster.scored_layers();
    ggml_backend_sched_set_callback_version(sched, &of.n_bindings);
}

extern "C" bool moegguf_keeps_graph(ggml_backend_sched_eval_callback eval, void * store) {
    if (eval != moegguf_eval) { return true; }
    const Store & of = ((moegguf_store *)store)->store;
    return of.context.passed_over == of.passed_over() && of.context.scored_layers == of.forecaster.scored_layers();
}

extern "C" bool moegguf_is_reserved(const ggml_tensor * w) { return store_of(w) || RowTables::has(w); }

extern "C" ggml_backend_buffer_type_t moegguf_adapter_buft(const ggml_tensor * w) {
    if (RowTables::has(w)) { return ggml_backend_cpu_buffer_type(); }
    Store * store = store_of(w);
    return ggml_backend_buffer_get_type((store ? store->pool_tensor(w->name, 1) : w)->buffer);
}

extern "C" ggml_tensor * moegguf_pool_tensor(ggml_tensor * w, const ggml_tensor * ids) {
    Store * store = store_of(w);
    return store ? store->pool_tensor(w->name, (int)ids->ne[1]) : w;
}

extern "C" ggml_tensor * moegguf_slot_ids(ggml_context * ctx, const ggml_tensor * w, ggml_tensor * expert_ids,
                                          ggml_tensor * weights, ggml_tensor * input, ggml_tensor * router, int il) {
    Store * store = store_of(w);
    if (!store) { return nullptr; }
    store->router_scores.keep(il, router);
    if (store->passes_over(store->tiers.of(il))) {
        ggml_format_name(expert_ids, "%s%d", own_ids_node, il);
        return nullptr;
    }
    if (store->maps(il, (int)expert_ids->ne[1])) {
        const std::string name = log_ids_node + std::to_string(il);
        return store->mapped->slot_ids(ctx, expert_ids, il, name.c_str());
    }
    const int n_scored = scored_layers(*store, il, input);
    ggml_backend_dev_t device = store->tiers.of(il).pool()->memory().device;
    ggml_tensor * joined =
        n_scored > 0 ? store->router_scores.join(ctx, expert_ids, input, il, n_scored, device) : nullptr;
    ggml_tensor * ids = joined ? joined : ggml_cont(ctx, expert_ids);
    ggml_format_name(ids, "%s%d", ids_node, il);
    ids->src[1] = weights; // a source of the node stays in memory until the hook reads it
    ids->src[2] = input;
    // The anchor weight keeps the node on the CPU. If the scheduler copied the ids to another device, kernels would not
    // read the ids that the hook writes.
    if (store->streamed->computes_on_arrival(il)) { ids->src[3] = store->tiers.on_cpu->pool()->cpu_anchor(); }
    ids->op_params[waits_word] = !store->tiers.of(il).numbering.resident();
    ids->op_params[scores_word] = joined ? n_scored : 0;
    return ids;
}

extern "C" ggml_tensor * moegguf_ready_ids(ggml_context * ctx, ggml_tensor * ids, int il) {
    ggml_tensor * ready = ggml_reshape_2d(ctx, ids, ids->ne[0], ids->ne[1]);
    ggml_format_name(ready, "%s%d", ready_node, il);
    return ready;
}

extern "C" void moegguf_order_nodes(ggml_cgraph * graph) {
    Delayed delayed(*graph);
    std::vector<ggml_tensor *> behind; // delayed nodes of the current layer
    int n = 0;
    const auto end_layer = [&] {
        std::copy(behind.begin(), behind.end(), graph->nodes + n);
        n += (int)behind.size();
        behind.clear();
    };
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor * t = graph->nodes[i];
        const bool has_words = t->op == GGML_OP_CONT || t->op == GGML_OP_VIEW;
        if (has_words && t->op_params[waits_word] && layer_of(t, ids_node) >= 0) {
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
