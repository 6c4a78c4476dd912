// hook.cpp: the scheduler's eval callback. Stops at a layer's expert ids, where experts are acquired, and before the
// multiplications whose matrices are still on their way, where kernels cannot wait for them (arrivals.h).
#include "nodes.h"
#include "reserved.h"
#include "store.h"

namespace moegguf {
namespace {

// Whether to stop at the node with the expert ids.
bool must_acquire(Lane & lane, const ggml_tensor * t, int il) {
    Acquire & acquire = lane.store.acquire;
    if (acquire.idle(il)) {
        acquire.count_idle(lane, il, (int)t->ne[0], (int)t->ne[1]);
        return false;
    }
    return true;
}

// The matrices to wait for once this node was computed.
uint8_t kinds_after(const Lane & lane, const ggml_tensor * t) {
    const int ready_il = layer_of(t, ready_node), il = ready_il >= 0 ? ready_il : layer_of(t, down_node);
    if (!lane.store.layout.has_experts(il) || lane.store.arrivals.on(il)) {
        return 0;
    }
    return ready_il >= 0 ? all_kinds & ~down_kind : down_kind;
}

// Whether the scheduler has to stop at this node.
bool must_stop(Lane & lane, const ggml_tensor * t) {
    if (lane.store.missed.must_write(lane, t)) {
        return true;
    }
    if (!is_of_experts(t)) {
        return false;
    }
    const int il = layer_of(t, ids_node);
    if (il >= 0) {
        return must_acquire(lane, t, il);
    }
    const uint8_t kinds = kinds_after(lane, t);
    return kinds && lane.store.acquire.pending(lane, kinds);
}

// The floats of a tensor: in place where they lie in host memory, copied to `scratch` where not. NULL when the
// tensor does not hold n of them in a row.
const float * floats(const ggml_tensor * t, size_t n, std::vector<float> & scratch) {
    if (!t || t->type != GGML_TYPE_F32 || !ggml_is_contiguous(t) || (size_t)ggml_nelements(t) != n || !t->buffer) {
        return nullptr;
    }
    if (ggml_backend_buffer_is_host(t->buffer)) {
        return (const float *)t->data;
    }
    scratch.resize(n);
    ggml_backend_tensor_get(t, scratch.data(), 0, n * sizeof(float));
    return scratch.data();
}

// What the listener asked for besides the ids; the patch makes these tensors sources of the node.
Routed routed(Lane & lane, const ggml_tensor * t, size_t n_used, size_t n_tokens) {
    const Events & events = lane.store.events;
    Routed known;
    if (events.wants_weights()) {
        known.weights = floats(t->src[1], n_used * n_tokens, lane.weights);
    }
    const bool inputs = events.wants_inputs((int)n_tokens) || lane.store.forecaster.wants_inputs((int)n_tokens);
    if (inputs && t->src[2]) {
        known.n_embd = (int)t->src[2]->ne[0];
        known.inputs = floats(t->src[2], known.n_embd * n_tokens, lane.inputs);
    }
    return known;
}

// What computes the layer, where that is a stream on the device of the slots that can wait for copies itself.
ggml_backend_t stream_of(const Lane & lane, const Tier & tier, ggml_tensor * t) {
    const Copies * copies = tier.copies;
    if (!copies || !copies->has_events() || !lane.scheduler) {
        return nullptr;
    }
    ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(lane.scheduler, t);
    const bool same = backend && ggml_backend_get_device(backend) == tier.pool()->memory().device;
    return same ? backend : nullptr;
}

// The CPU begins with the experts that it computes, beside the device.
void begin_missed(Lane & lane, const ggml_tensor * t) {
    if (!lane.missed || lane.failed) {
        return;
    }
    const int n_tokens = (int)t->ne[1], n_embd = (int)t->src[2]->ne[0];
    const float * inputs = floats(t->src[2], (size_t)n_embd * n_tokens, lane.inputs);
    const float * weights =
        lane.chain->weights_input ? floats(t->src[1], (size_t)ggml_nelements(t), lane.weights) : nullptr;
    lane.store.missed.begin(lane, inputs, n_embd, weights, n_tokens);
}

void acquire_experts(Lane & lane, ggml_tensor * t, int il) {
    const int n_used = (int)t->ne[0], n_tokens = (int)t->ne[1];
    const size_t n = (size_t)n_used * n_tokens;
    const uint8_t kinds = lane.store.shared.has(MOEGGUF_OVERLAP) ? 0 : all_kinds;
    if (n == 0) {
        return;
    }
    lane.stream = lane.store.layout.has_experts(il) ? stream_of(lane, lane.store.tiers.of(il), t) : nullptr;
    lane.ids_in_place = ggml_backend_buffer_is_host(t->buffer);
    lane.chain = chain_of(t);
    const Routed known = routed(lane, t, n_used, n_tokens);
    if (ggml_backend_buffer_is_host(t->buffer)) {
        lane.store.acquire.acquire(lane, il, (int32_t *)t->data, n_used, n_tokens, kinds, known);
        begin_missed(lane, t);
        return;
    }
    lane.ids.resize(n);
    ggml_backend_tensor_get(t, lane.ids.data(), 0, n * sizeof(int32_t));
    lane.store.acquire.acquire(lane, il, lane.ids.data(), n_used, n_tokens, kinds, known);
    begin_missed(lane, t);
    ggml_backend_tensor_set(t, lane.ids.data(), 0, n * sizeof(int32_t));
}

// What a stop is for. No exception leaves it: the caller is C.
void stopped(Lane & lane, ggml_tensor * t) {
    const bool writes = lane.store.missed.must_write(lane, t);
    if (!writes && !is_of_experts(t)) {
        return;
    }
    const int il = layer_of(t, ids_node);
    try {
        if (writes) {
            lane.store.missed.write(lane, t);
        } else if (il >= 0) {
            acquire_experts(lane, t, il);
        } else if (const uint8_t kinds = kinds_after(lane, t)) {
            lane.store.acquire.wait(lane, kinds);
        }
    } catch (const std::exception & e) {
        lane.fail(MOEGGUF_MEMORY, il, -1, e.what());
        if (il >= 0) {
            ggml_backend_tensor_memset(t, 0, 0, ggml_nbytes(t)); // slots that exist, for a pass that ends here
        }
    }
}

} // namespace
} // namespace moegguf

using namespace moegguf;

extern "C" bool moegguf_eval(ggml_tensor * t, bool ask, void * user) {
    Lane & lane = *((moegguf_lane *)user)->lane;
    // Both callbacks see every node that either of them asked for.
    if (ask) {
        return (lane.next_eval && lane.next_eval(t, true, lane.next_user)) || must_stop(lane, t);
    }
    stopped(lane, t);
    return !lane.next_eval || lane.next_eval(t, false, lane.next_user);
}

extern "C" bool moegguf_abort(void * user) {
    Lane & lane = *((moegguf_lane *)user)->lane;
    return lane.store.acquire.must_abort(lane);
}

extern "C" void moegguf_set_scheduler(ggml_backend_sched_eval_callback eval, void * lane, ggml_backend_sched_t sched) {
    if (eval == moegguf_eval) {
        ((moegguf_lane *)lane)->lane->scheduler = sched;
    }
}

extern "C" bool moegguf_is_reserved(const ggml_tensor * w) {
    return store_of(w) != nullptr;
}

extern "C" ggml_tensor * moegguf_pool_tensor(ggml_tensor * w, const ggml_tensor * ids) {
    Store * store = store_of(w);
    return store ? store->pool_tensor(w->name, (int)ids->ne[1]) : w;
}
