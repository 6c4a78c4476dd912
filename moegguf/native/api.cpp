// api.cpp: the C ABI over the store.
#include "api.h"

#include <algorithm>
#include <cstring>

using namespace moegguf;

namespace {

void check_size(const Context & context, int32_t n_expert_used, int32_t n_tokens) {
    constexpr int32_t most_tokens = 1 << 24;
    if (n_expert_used < 1 || n_expert_used > context.store.layout.n_expert_max || n_tokens < 1 ||
        n_tokens > most_tokens) {
        throw Error(MOEGGUF_INVALID,
                    "a routing event has ids of at least one token, and no more per token than experts");
    }
}

void check_failure(const Context & context) {
    if (context.failed()) {
        throw Error((moegguf_status)context.failure.reason.status, context.failure.reason.message);
    }
}

} // namespace

extern "C" {

uint32_t moegguf_abi_version(void) { return MOEGGUF_ABI_VERSION; }

const char * moegguf_last_error(void) { return last_error.c_str(); }

int moegguf_slot_sizes(const moegguf_matrix * matrices, int32_t n_matrices, int32_t n_slots, moegguf_sizes * sizes) {
    return guarded([&] {
        if (n_matrices < 0 || n_slots < 0 || (n_matrices > 0 && !matrices)) {
            throw Error(MOEGGUF_INVALID, "sizes need matrices and a number of slots");
        }
        const Strides strides(matrices, n_matrices);
        moegguf_sizes & out = given(sizes);
        std::copy(std::begin(strides.of_kind), std::end(strides.of_kind), out.stride_bytes);
        out.slot_bytes = strides.slot_bytes();
        out.pool_bytes = strides.pool_bytes(n_slots);
        out.guard_bytes = out.pool_bytes - out.slot_bytes * n_slots;
        out.streams = cpu_kernels_ask_for_order(matrices, n_matrices);
    });
}

int moegguf_pad(const char * device, moegguf_matrix * matrices, int32_t n_matrices) {
    return guarded([&] {
        ggml_backend_dev_t found = device ? ggml_backend_dev_by_name(device) : nullptr;
        if (found && n_matrices > 0) { pad(found, &given(matrices), n_matrices); }
    });
}

int moegguf_most_slots(const char * device, const moegguf_matrix * matrices, int32_t n_matrices, int32_t n_slots,
                       int32_t * most) {
    return guarded([&] {
        if (n_matrices < 1 || n_slots < 1 || !matrices) {
            throw Error(MOEGGUF_INVALID, "a pool has matrices and slots");
        }
        given(most) = most_slots(find_device(device), matrices, n_matrices, n_slots);
    });
}

int32_t moegguf_slot_tokens(const char * device) { return device ? most_slot_tokens(device) : INT32_MAX; }

int moegguf_store_open(const moegguf_config * config, moegguf_store ** store) {
    return guarded([&] {
        if (!config || config->abi != MOEGGUF_ABI_VERSION) {
            throw Error(MOEGGUF_INVALID, "the library has ABI " + std::to_string(MOEGGUF_ABI_VERSION));
        }
        moegguf_store *& opened = given(store); // before there is anything to lose
        report_device_failures();
        opened = new moegguf_store(*config);
    });
}

void moegguf_store_close(moegguf_store * store) {
    if (store && !store->store.shared.forked()) { // in a child the locks and threads are the parent's: leave them
        delete store;
    }
}

ggml_backend_buffer_type_t moegguf_store_buft(moegguf_store * store) { return store ? store->store.buft() : nullptr; }

int moegguf_store_info(moegguf_store * store, moegguf_pool_info * info) {
    return on(store, [&](Store & s) { s.info(given(info)); });
}

int moegguf_store_counters(moegguf_store * store, moegguf_counters * counters) {
    return on(store, [&](Store & s) { s.read_counters(given(counters)); });
}

int moegguf_store_tier(moegguf_store * store, int32_t tier, moegguf_tier_info * info) {
    return on(store, [&](Store & s) { s.tier_info(tier, given(info)); });
}

int moegguf_store_residency(moegguf_store * store, int32_t tier, uint8_t * map, size_t n) {
    return on(store, [&](Store & s) { s.residency(tier, &given(map), n); });
}

int moegguf_store_activity(moegguf_store * store, uint32_t * uses, uint32_t * loads, size_t n) {
    return on(store, [&](Store & s) { s.activity(&given(uses), &given(loads), n); });
}

int moegguf_store_watch(moegguf_store * store, int watched) {
    return on(store, [&](Store & s) { s.acquire.watch(watched != 0); });
}

int moegguf_store_set_scores(moegguf_store * store, const float * scores, size_t n) {
    return on(store, [&](Store & s) { s.set_scores(scores, n); });
}

int moegguf_store_set_policy(moegguf_store * store, int32_t tier, const char * name, const float * values, size_t n) {
    return on(store, [&](Store & s) {
        s.set_policy(tier, &given(name), n > 0 ? Values(&given(values), values + n) : Values());
    });
}

const char * moegguf_policy_name(int32_t index, int32_t * takes_forecast) {
    const PolicyType * type = policy_at(index);
    if (type && takes_forecast) { *takes_forecast = type->takes_forecast; }
    return type ? type->name : nullptr;
}

int moegguf_store_set_forecast(moegguf_store * store, const float * probabilities, const uint8_t * known, size_t n) {
    return on(store, [&](Store & s) { s.set_forecast(probabilities, known, n); });
}

int moegguf_store_set_predictor(moegguf_store * store, const moegguf_predictor * predictor) {
    return on(store, [&](Store & s) { s.forecaster.set(predictor); });
}

int moegguf_store_act(moegguf_store * store, int act) {
    return on(store, [&](Store & s) { s.forecaster.prefetch(act != 0); });
}

int moegguf_store_forecast(moegguf_store * store, float * probabilities, uint8_t * known, size_t n) {
    return on(store, [&](Store & s) {
        if (n != s.layout.n_keys()) {
            throw Error(MOEGGUF_INVALID,
                        "a forecast has " + std::to_string(s.layout.n_keys()) + " entries, not " + std::to_string(n));
        }
        s.forecaster.read(&given(probabilities), &given(known));
    });
}

int moegguf_store_prefetch(moegguf_store * store, const int32_t * il, const int32_t * experts, size_t n, int replace) {
    return on(store, [&](Store & s) {
        s.want(Cause::request, n > 0 ? &given(il) : il, n > 0 ? &given(experts) : experts, n, replace != 0);
    });
}

int moegguf_store_warm(moegguf_store * store, const int32_t * il, const int32_t * experts, size_t n) {
    return on(store, [&](Store & s) {
        s.want(Cause::warm_start, n > 0 ? &given(il) : il, n > 0 ? &given(experts) : experts, n, true);
    });
}

int moegguf_store_hold_fill(moegguf_store * store, int hold) {
    return on(store, [&](Store & s) { s.hold_fill(hold); });
}

int moegguf_store_listen(moegguf_store * store, const moegguf_listener * listener) {
    return on(store, [&](Store & s) { listener ? s.events.start(*listener) : s.events.stop(); });
}

int moegguf_store_cancel(moegguf_store * store, int cancel) {
    return on(store, [&](Store & s) { s.cancel(cancel); });
}

int moegguf_store_resize(moegguf_store * store, int32_t tier, int32_t n_slots, int at_once) {
    return on(store, [&](Store & s) { s.resize(tier, n_slots, at_once != 0); });
}

int moegguf_store_drain(moegguf_store * store, double timeout_s) {
    return on(store, [&](Store & s) {
        if (!s.drain(timeout_s)) {
            throw Error(MOEGGUF_CANCELLED, "transfers were still going on after the given time");
        }
    });
}

int moegguf_store_read_slot(moegguf_store * store, int32_t matrix, int32_t slot, void * out, size_t n) {
    return on(store, [&](Store & s) { s.read_slot(matrix, slot, &given((uint8_t *)out), n); });
}

int moegguf_store_sim_advance(moegguf_store * store, uint64_t ns) {
    return on(store, [&](Store & s) { s.advance(ns); });
}

int moegguf_context_acquire(moegguf_store * store, int32_t il, const int32_t * expert_ids, int32_t n_expert_used,
                            int32_t n_tokens, const float * inputs, int32_t n_embd, int32_t * slot_ids) {
    return guarded([&] {
        Context & c = given(store).store.context;
        check_size(c, n_expert_used, n_tokens);
        memcpy(&given(slot_ids), &given(expert_ids), sizeof(int32_t) * n_expert_used * n_tokens);
        if (inputs && n_embd <= 0) {
            throw Error(MOEGGUF_INVALID, "a router's input has values, not " + std::to_string(n_embd));
        }
        Choice choice = {il, slot_ids, n_expert_used, n_tokens, all_kinds};
        choice.inputs = inputs;
        choice.n_embd = inputs ? n_embd : 0;
        c.store.acquire.acquire(c, choice);
        check_failure(c);
    });
}

int moegguf_context_replay(moegguf_store * store, const moegguf_routing * routing, int64_t * n_done) {
    return guarded([&] {
        Context & c = given(store).store.context;
        const moegguf_routing & r = given(routing);
        given(n_done) = 0;
        if (r.n_events < 0 || (r.n_events > 0 && (!r.il || !r.n_tokens || !r.n_expert_used || !r.expert_ids))) {
            throw Error(MOEGGUF_INVALID, "a replay needs a layer, tokens and expert ids for each event");
        }
        int64_t n_ids = 0;
        for (int64_t i = 0; i < r.n_events; i++) {
            check_size(c, r.n_expert_used[i], r.n_tokens[i]);
            n_ids += (int64_t)r.n_expert_used[i] * r.n_tokens[i];
        }
        if (n_ids != r.n_ids) {
            throw Error(MOEGGUF_INVALID, "the events have " + std::to_string(n_ids) + " expert ids together, not " +
                                             std::to_string(r.n_ids));
        }
        if (r.compute_ns && !c.store.shared.clock->can_advance()) {
            throw Error(MOEGGUF_INVALID, "only a simulation has a modelled clock");
        }
        *n_done = c.store.replay(r);
        check_failure(c);
    });
}

int moegguf_context_awaits_tokens(moegguf_store * store, int32_t sequence, int32_t phase) {
    Context & c = store->store.context;
    return c.store.acquire.awaits_tokens(c, sequence, phase);
}

int moegguf_context_announce(moegguf_store * store, const moegguf_tokens_event * tokens) {
    return guarded([&] {
        const moegguf_tokens_event & event = given(tokens);
        const auto known = [](int32_t phase) { return phase == MOEGGUF_PREFILL || phase == MOEGGUF_DECODE; };
        if (event.n_tokens < 0 || (event.n_tokens > 0 && !event.tokens) || !known(event.phase)) {
            throw Error(MOEGGUF_INVALID, "an announcement has a phase and its tokens");
        }
        if (!event.sequences != !event.phases || !event.sequences != !event.outputs ||
            (event.phases && !std::all_of(event.phases, event.phases + event.n_tokens, known))) {
            throw Error(MOEGGUF_INVALID, "tokens of several sequences have a sequence, a phase and an output each");
        }
        Context & c = given(store).store.context;
        if (c.store.shared.forked()) { // a thread of the parent may hold the lock
            throw Error(MOEGGUF_FORKED, "the model was loaded in the parent process");
        }
        c.store.acquire.announce_tokens(c, event);
    });
}

int moegguf_context_is_clear(moegguf_store * store) { return store->store.acquire.is_clear(store->store.context); }

int moegguf_context_failure(moegguf_store * store, moegguf_failure * failure, int clear) {
    return guarded([&] {
        Store & s = given(store).store;
        s.acquire.take_failure(s.context, given(failure), clear);
    });
}

void moegguf_context_chain(moegguf_store * store, ggml_backend_sched_eval_callback next, void * user) {
    store->store.context.next_eval = next;
    store->store.context.next_user = user;
}

} // extern "C"
