// hook.cpp: the scheduler's eval callback. Stops at a layer's expert ids, where experts are acquired, and before the
// multiplications whose matrices are still on their way, where kernels cannot wait for them (arrivals.h).
//
// It may read and overwrite the ids of the node that it stops at, by Acquire alone, and changes no slot itself.
#include "nodes.h"
#include "reserved.h"
#include "store.h"

namespace moegguf {
namespace {

// Whether to stop at the node with the expert ids.
bool must_acquire(Context & context, const ggml_tensor * t, int il) {
    Acquire & acquire = context.store.acquire;
    if (acquire.idle(il)) {
        acquire.count_idle(context, il, (int)t->ne[0], (int)t->ne[1]);
        return false;
    }
    return true;
}

// The matrices to wait for once this node was computed.
uint8_t kinds_after(const Context & context, const ggml_tensor * t) {
    const int ready_il = layer_of(t, ready_node), il = ready_il >= 0 ? ready_il : layer_of(t, down_node);
    if (!context.store.layout.has_experts(il) || context.store.arrivals.on(il)) { return 0; }
    return ready_il >= 0 ? all_kinds & ~down_kind : down_kind;
}

// Whether the scheduler has to stop at this node.
bool must_stop(Context & context, const ggml_tensor * t) {
    if (!is_of_experts(t)) { return false; }
    const int il = layer_of(t, ids_node);
    if (il >= 0) { return must_acquire(context, t, il); }
    const uint8_t kinds = kinds_after(context, t);
    return kinds && !context.failed() && !context.store.shared.forked() && context.pinned.pending(kinds);
}

// What observers asked for besides the ids; the patch makes these tensors sources of the node.
void read_details(Context & context, const ggml_tensor * t, Choice & choice) {
    const Store & store = context.store;
    if (store.events.wants_weights()) {
        choice.weights = floats(t->src[1], (size_t)choice.n_expert_used * choice.n_tokens, context.weights);
    }
    const int n_tokens = choice.n_tokens;
    if ((store.events.wants_inputs(n_tokens) || store.forecaster.wants_inputs(n_tokens)) && t->src[2]) {
        choice.n_embd = (int)t->src[2]->ne[0];
        choice.inputs = floats(t->src[2], (size_t)choice.n_embd * n_tokens, context.inputs);
    }
}

// What computes the layer, where that is a stream on the device of the slots that can wait for copies itself.
ggml_backend_t stream_of(const Context & context, const Tier & tier, ggml_tensor * t) {
    const Copies * copies = tier.copies;
    if (!copies || !copies->has_events() || !context.scheduler) { return nullptr; }
    ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(context.scheduler, t);
    const bool same = backend && ggml_backend_get_device(backend) == tier.pool()->memory().device;
    return same ? backend : nullptr;
}

void acquire_experts(Context & context, ggml_tensor * t, int il) {
    Store & store = context.store;
    const bool in_place = ggml_backend_buffer_is_host(t->buffer);
    Choice choice = {il, (int32_t *)t->data, (int)t->ne[0], (int)t->ne[1]};
    const size_t n = (size_t)choice.n_expert_used * choice.n_tokens;
    if (n == 0) { return; }
    choice.wait_kinds = store.shared.has(MOEGGUF_OVERLAP) ? 0 : all_kinds;
    choice.ids_in_place = in_place;
    choice.stream = store.layout.has_experts(il) ? stream_of(context, store.tiers.of(il), t) : nullptr;
    read_details(context, t, choice);
    if (!in_place) {
        context.ids.resize(n);
        ggml_backend_tensor_get(t, context.ids.data(), 0, n * sizeof(int32_t));
        choice.ids = context.ids.data();
    }
    store.acquire.acquire(context, choice);
    if (!in_place) { ggml_backend_tensor_set(t, context.ids.data(), 0, n * sizeof(int32_t)); }
}

// What a stop is for. No exception leaves it: the caller is C.
void stopped(Context & context, ggml_tensor * t) {
    if (!is_of_experts(t)) { return; }
    const int il = layer_of(t, ids_node);
    try {
        if (il >= 0) {
            acquire_experts(context, t, il);
        } else if (const uint8_t kinds = kinds_after(context, t); kinds && context.supply) {
            context.supply->wait(context, kinds);
        }
    } catch (const std::exception & e) {
        context.fail(MOEGGUF_MEMORY, il, -1, e.what());
        if (il >= 0) {
            ggml_backend_tensor_memset(t, 0, 0, ggml_nbytes(t)); // slots that exist, for a pass that ends here
        }
    }
}

} // namespace
} // namespace moegguf

using namespace moegguf;

extern "C" bool moegguf_eval(ggml_tensor * t, bool ask, void * store) {
    Context & context = ((moegguf_store *)store)->store.context;
    // Both callbacks see every node that either of them asked for.
    if (ask) { return (context.next_eval && context.next_eval(t, true, context.next_user)) || must_stop(context, t); }
    stopped(context, t);
    return !context.next_eval || context.next_eval(t, false, context.next_user);
}

extern "C" bool moegguf_abort(void * store) {
    Context & context = ((moegguf_store *)store)->store.context;
    return context.store.acquire.must_abort(context);
}

extern "C" void moegguf_set_scheduler(ggml_backend_sched_eval_callback eval, void * store, ggml_backend_sched_t sched) {
    if (eval == moegguf_eval) { ((moegguf_store *)store)->store.context.scheduler = sched; }
}

extern "C" bool moegguf_is_reserved(const ggml_tensor * w) { return store_of(w) != nullptr; }

extern "C" ggml_tensor * moegguf_pool_tensor(ggml_tensor * w, const ggml_tensor * ids) {
    Store * store = store_of(w);
    return store ? store->pool_tensor(w->name, (int)ids->ne[1]) : w;
}
