// api.cpp: implements the functions of moegguf.h that compute slot sizes, and the ones that open, control and query a
// store and its context. Most of them check their arguments and then call the store.
#include "api.h"
#include "switches.h"

#include "ggml-impl.h" // declares ggml_print_backtrace()

#include <algorithm>
#include <cstdio>
#include <cstring>

using namespace moegguf;

namespace {

// If a device fails, its backend calls ggml_abort() on one of the threads, which terminates the process. Before that,
// the callback report_failure() prints a line about the device to stderr. If the process is a worker, the parent
// process recognizes this line (moegguf/serving/worker_process.py), and later loads do not use the device.

ggml_abort_callback_t next_callback = nullptr;

// Returns true if the file in the message "FILE:LINE: text" has "ggml-" in its path, as device backend files do.
// Returns false for files of the CPU backend, and for ggml-backend and ggml-alloc. Messages from those files report
// program errors, not device failures.
bool of_a_device(const char * message) {
    const char * text = strstr(message, ": ");
    const auto names = [&](const char * part) {
        const char * at = strstr(message, part);
        return at && (!text || at < text);
    };
    return names("ggml-") && !names("ggml-cpu") && !names("ggml-backend") && !names("ggml-alloc");
}

void report_failure(const char * message) {
    if (of_a_device(message)) {
        const char * text = strstr(message, ": ");
        fprintf(stderr,
                "moegguf: the device failed: %s. This process ends; run again, and without vram_cache on the CPU.\n",
                text ? text + 2 : message);
    }
    if (next_callback) {
        next_callback(message);
    } else {
        fprintf(stderr, "%s\n", message);
        ggml_print_backtrace();
    }
}

void check_size(const Context & context, int32_t n_expert_used, int32_t n_tokens) {
    constexpr int32_t most_tokens = 1 << 24;
    if (n_expert_used < 1 || n_expert_used > context.store.layout.n_expert_max || n_tokens < 1 ||
        n_tokens > most_tokens) {
        throw Error(
            MOEGGUF_INVALID,
            "a routing event must have 1 to 2^24 tokens, and for each token 1 or more expert ids, but not more than a "
            "layer has experts");
    }
}

void check_failure(const Context & context) {
    if (context.failed()) {
        throw Error((moegguf_status)context.failure.reason.status, context.failure.reason.message);
    }
}

// Appends `more` to the string in a char array, after a comma if the array is not empty. Does nothing if `more` is
// empty. Cuts off text that does not fit.
template <size_t n>
void append(char (&text)[n], const std::string & more) {
    const size_t used = strlen(text);
    if (!more.empty()) { snprintf(text + used, n - used, "%s%s", used > 0 ? ", " : "", more.c_str()); }
}

void add_pool(moegguf_tier_info & out, const Pool & pool) {
    out.pool_bytes += pool.bytes();
    out.pinned_memory = pool.memory().pinned;
    const char *device = ggml_backend_dev_name(pool.memory().device), *last = strrchr(out.device, ' ');
    if (strcmp(last ? last + 1 : out.device, device) == 0) {
        // The pool added before this one is on the same device, so out.device already contains the device's name.
        return;
    }
    append(out.device, device);
    append(out.note, pool.memory().note);
}

void check_table(const Store & s, size_t n, const char * what) {
    if (n != s.layout.n_keys()) {
        throw Error(MOEGGUF_INVALID, std::string(what) + " must have " + std::to_string(s.layout.n_keys()) +
                                         " entries, not " + std::to_string(n));
    }
}

void advance(Store & s, uint64_t ns) {
    Lock lock(s.shared.mutex);
    s.shared.clock->advance(ns);
}

// Acquires the experts of routing events in order, until one fails. n_done must be 0 on entry. On return it is the
// number of handled events, including the failed one.
void replay(Context & c, const moegguf_routing & routing, int64_t & n_done) {
    std::vector<int32_t> slot_ids;
    const int32_t * ids = routing.expert_ids;
    for (; n_done < routing.n_events && !c.failed(); n_done++) {
        const int n_used = routing.n_expert_used[n_done], n_tokens = routing.n_tokens[n_done];
        const size_t n = (size_t)n_used * n_tokens;
        slot_ids.assign(ids, ids + n);
        ids += n;
        c.store.acquire({routing.il[n_done], slot_ids.data(), n_used, n_tokens, all_kinds});
        if (routing.compute_ns && !c.failed()) { advance(c.store, routing.compute_ns[n_done]); }
    }
}

void add_tier(moegguf_tier_info & out, const Tier & tier) {
    add(&tier.counters.lookups, offsetof(moegguf_tier_info, pool_bytes), &out.lookups);
    out.n_slots += tier.residency.n_slots();
    out.n_slots_usable += tier.residency.n_usable();
    out.resident = out.resident && tier.numbering.resident();
    if (const Pool * pool = tier.pool()) { add_pool(out, *pool); }
}

} // namespace

extern "C" {

uint32_t moegguf_abi_version(void) { return MOEGGUF_ABI_VERSION; }

uint32_t moegguf_switches(void) { return all_remedies; }

uint32_t moegguf_switched_on(void) { return remedies_on; }

const char * moegguf_last_error(void) { return last_error.c_str(); }

int moegguf_slot_sizes(const moegguf_matrix * matrices, int32_t n_matrices, int32_t n_slots, int32_t on_device,
                       moegguf_sizes * sizes) {
    return guarded([&] {
        if (n_matrices < 0 || n_slots < 0 || (n_matrices > 0 && !matrices)) {
            throw Error(MOEGGUF_INVALID,
                        "slot sizes need a number of matrices and a number of slots, each 0 or more, and the matrices");
        }
        const Strides strides = strides_for(matrices, n_matrices, on_device && is_on(Remedy::one_arena));
        moegguf_sizes & out = given(sizes);
        std::copy(std::begin(strides.of_arena), std::end(strides.of_arena), out.stride_bytes);
        out.slot_bytes = strides.slot_bytes();
        out.pool_bytes = strides.pool_bytes(n_slots);
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
            throw Error(MOEGGUF_INVALID, "a pool must have at least one matrix and one slot");
        }
        ggml_backend_dev_t of = find_device(device);
        given(most) = most_slots(of, matrices, n_matrices, n_slots, packs_slots(of));
    });
}

int32_t moegguf_maps(const char * device) { return maps(device); }

int32_t moegguf_slot_tokens(const char * device) { return device ? most_slot_tokens(device) : INT32_MAX; }

int moegguf_store_open(const moegguf_config * config, moegguf_store ** store) {
    return guarded([&] {
        if (!config || config->abi != MOEGGUF_ABI_VERSION) {
            throw Error(MOEGGUF_INVALID,
                        "the caller must use the ABI of this library, ABI " + std::to_string(MOEGGUF_ABI_VERSION));
        }
        moegguf_store *& opened = given(store); // throws for NULL before a store is created
        static std::once_flag once;
        std::call_once(once, [] { next_callback = ggml_set_abort_callback(report_failure); });
        opened = new moegguf_store(*config);
    });
}

void moegguf_store_close(moegguf_store * store) {
    if (store && !store->store.shared.forked()) { // a forked child must not touch the parent's locks and threads
        delete store;
    }
}

ggml_backend_buffer_type_t moegguf_store_buft(moegguf_store * store) { return store ? store->store.buft() : nullptr; }

ggml_backend_buffer_type_t moegguf_store_row_buft(moegguf_store * store) {
    return store ? store->store.row_tables.buft() : nullptr;
}

int moegguf_store_counters(moegguf_store * store, moegguf_counters * counters) {
    return on(store, [&](Store & s) {
        moegguf_counters & out = given(counters);
        out = {};
        add(&s.shared.counters.passes, sizeof(out), &out.passes);
        out.events_dropped = s.events.dropped();
        out.queue_needed = s.transfers.n_queued(true);
        out.queue_wanted = s.transfers.n_queued(false) + s.transfers.n_wanted();
        for (const auto & link : s.copies) {
            out.queue_needed += link->n_queued(true);
            out.queue_wanted += link->n_queued(false);
        }
    });
}

int moegguf_store_tier(moegguf_store * store, int32_t tier, moegguf_tier_info * info) {
    return on(store, [&](Store & s) {
        moegguf_tier_info & out = given(info);
        const std::vector<Tier *> of = s.tiers_at(tier);
        Lock lock(s.shared.mutex);
        out = {};
        out.resident = true;
        out.direct = s.transfers.direct();
        out.n_experts = s.layout.n_experts;
        uint64_t bytes = 0;
        for (const Tier * each : of) {
            add_tier(out, *each);
            bytes += each->residency.n_slots() * each->layers.strides.slot_bytes();
        }
        out.slot_bytes = bytes / std::max(1, out.n_slots);
    });
}

int moegguf_store_drive(moegguf_store * store, int32_t index, moegguf_drive_info * info) {
    return on(store, [&](Store & s) { s.transfers.drive_info(index, given(info)); });
}

int moegguf_store_residency(moegguf_store * store, int32_t tier, uint8_t * map, size_t n) {
    return on(store, [&](Store & s) {
        const std::vector<Tier *> of = s.tiers_at(tier);
        check_table(s, n, "a map");
        Lock lock(s.shared.mutex);
        memset(&given(map), 0, n);
        for (const Tier * each : of) {
            for (int i = 0; i < each->residency.n_slots(); i++) {
                const Slot & slot = each->residency.slot(i);
                if (slot.expert >= 0) { map[s.layout.key(slot.il, slot.expert)] = each->residency.complete(i) ? 2 : 1; }
            }
        }
    });
}

int moegguf_store_activity(moegguf_store * store, uint32_t * uses, uint32_t * loads, size_t n) {
    return on(store, [&](Store & s) {
        given(uses), given(loads);
        check_table(s, n, "a table of activity");
        Lock lock(s.shared.mutex);
        for (int il : s.layout.moe_layers) {
            const Residency & residency = s.tiers.of(il).residency;
            const int first = s.layout.key(il, 0);
            std::copy_n(residency.uses().begin() + first, s.layout.n_expert_max, uses + first);
            std::copy_n(residency.loads().begin() + first, s.layout.n_expert_max, loads + first);
        }
    });
}

int moegguf_store_watch(moegguf_store * store, int watched) {
    return on(store, [&](Store & s) { s.watch(watched != 0); });
}

int moegguf_store_set_scores(moegguf_store * store, const float * scores, size_t n) {
    return on(store, [&](Store & s) {
        if (scores) { check_table(s, n, "a score table"); }
        std::vector<std::vector<float>> tables(s.tiers.compute.size(), ScoreTable::finite(scores, scores ? n : 0));
        Lock lock(s.shared.mutex);
        for (size_t i = 0; i < tables.size(); i++) { s.tiers.compute[i]->residency.exchange_scores(tables[i]); }
        lock.unlock(); // the replaced tables are destroyed without holding the lock
    });
}

int moegguf_store_set_policy(moegguf_store * store, int32_t tier, const char * name) {
    return on(store, [&](Store & s) {
        const std::vector<Tier *> of = s.tiers_at(tier);
        std::vector<std::unique_ptr<EvictionPolicy>> next;
        for (size_t i = 0; i < of.size(); i++) { next.push_back(make_policy(s.layout, &given(name))); }
        Lock lock(s.shared.mutex);
        for (size_t i = 0; i < of.size(); i++) { of[i]->residency.exchange_policy(next[i]); }
        lock.unlock(); // the replaced policies are destroyed without holding the lock
    });
}

const char * moegguf_policy_name(int32_t index, int32_t * takes_forecast) {
    const PolicyType * type = policy_at(index);
    if (type && takes_forecast) { *takes_forecast = type->takes_forecast; }
    return type ? type->name : nullptr;
}

int moegguf_store_set_forecast(moegguf_store * store, const float * probabilities, const uint8_t * known, size_t n) {
    return on(store, [&](Store & s) {
        if (probabilities) { check_table(s, n, "a forecast"), given(known); }
        Lock lock(s.shared.mutex);
        for (int il : s.layout.moe_layers) {
            const bool is_known = probabilities && known[il];
            s.tiers.of(il).residency.on_forecast(il, is_known ? probabilities + s.layout.key(il, 0) : nullptr);
        }
    });
}

int moegguf_store_set_predictor(moegguf_store * store, const moegguf_predictor * predictor) {
    return on(store, [&](Store & s) { s.forecaster.set(predictor); });
}

int moegguf_store_prefetch(moegguf_store * store, int act) {
    return on(store, [&](Store & s) { s.forecaster.prefetch(act != 0); });
}

int moegguf_store_forecast(moegguf_store * store, float * probabilities, uint8_t * known, size_t n) {
    return on(store, [&](Store & s) {
        check_table(s, n, "a forecast");
        s.forecaster.read(&given(probabilities), &given(known));
    });
}

int moegguf_store_want(moegguf_store * store, const int32_t * il, const int32_t * experts, size_t n, int warm) {
    return on(store, [&](Store & s) {
        if (n > 0) { given(il), given(experts); }
        const Cause cause = warm ? Cause::warm_start : Cause::request;
        Lock lock(s.shared.mutex);
        if (warm) { s.transfers.forget(cause); }
        for (size_t i = 0; i < n; i++) { s.transfers.want({il[i], experts[i], cause}); }
        s.transfers.wake_readers();
    });
}

int moegguf_store_pause_fill(moegguf_store * store, int hold) {
    return on(store, [&](Store & s) {
        Lock lock(s.shared.mutex);
        s.transfers.pause_fill(hold);
    });
}

int moegguf_store_listen(moegguf_store * store, const moegguf_listener * listener) {
    return on(store, [&](Store & s) { listener ? s.events.start(*listener) : s.events.stop(); });
}

int moegguf_store_cancel(moegguf_store * store, int cancel) {
    return on(store, [&](Store & s) {
        Lock lock(s.shared.mutex);
        s.shared.cancelled = cancel;
        s.shared.done.notify_all();
    });
}

int moegguf_store_resize(moegguf_store * store, int32_t tier, int32_t n_slots) {
    return on(store, [&](Store & s) {
        const std::vector<Tier *> of = s.tiers_at(tier);
        if (of.size() != 1) { throw Error(MOEGGUF_INVALID, "only one pool of slots can be resized at a time"); }
        s.resize(*of[0], n_slots);
    });
}

int moegguf_store_drain(moegguf_store * store, double timeout_s) {
    return on(store, [&](Store & s) {
        constexpr double longest_s = 1e7;
        const std::chrono::duration<double> limit(timeout_s > 0 ? std::min(timeout_s, longest_s) : 0);
        const auto deadline =
            std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(limit);
        Lock lock(s.shared.mutex);
        if (!s.shared.wait_regardless(lock, [&] { return s.transfers.idle(); }, deadline)) {
            throw Error(MOEGGUF_CANCELLED, "transfers did not end within the given time; wait longer");
        }
        s.tiers.check();
    });
}

int moegguf_store_check(moegguf_store * store) {
    return on(store, [](Store & s) {
        Lock lock(s.shared.mutex);
        s.tiers.check();
    });
}

int moegguf_store_sim_advance(moegguf_store * store, uint64_t ns) {
    return on(store, [&](Store & s) { advance(s, ns); });
}

int moegguf_context_acquire(moegguf_store * store, int32_t il, const int32_t * expert_ids, int32_t n_expert_used,
                            int32_t n_tokens, const float * inputs, int32_t n_embd, int32_t * slot_ids) {
    return guarded([&] {
        Context & c = given(store).store.context;
        check_size(c, n_expert_used, n_tokens);
        memcpy(&given(slot_ids), &given(expert_ids), sizeof(int32_t) * n_expert_used * n_tokens);
        if (inputs && n_embd <= 0) {
            throw Error(MOEGGUF_INVALID,
                        "the number of values in a router's input must be above 0, not " + std::to_string(n_embd));
        }
        Choice choice = {il, slot_ids, n_expert_used, n_tokens, all_kinds};
        choice.inputs = inputs;
        choice.n_embd = inputs ? n_embd : 0;
        c.store.acquire(choice);
        check_failure(c);
    });
}

int moegguf_context_replay(moegguf_store * store, const moegguf_routing * routing, int64_t * n_done) {
    return guarded([&] {
        Context & c = given(store).store.context;
        const moegguf_routing & r = given(routing);
        given(n_done) = 0;
        if (r.n_events < 0 || (r.n_events > 0 && (!r.il || !r.n_tokens || !r.n_expert_used || !r.expert_ids))) {
            throw Error(MOEGGUF_INVALID,
                        "a replay needs a layer, a number of tokens, a number of experts per token and expert ids for "
                        "each event");
        }
        int64_t n_ids = 0;
        for (int64_t i = 0; i < r.n_events; i++) {
            check_size(c, r.n_expert_used[i], r.n_tokens[i]);
            n_ids += (int64_t)r.n_expert_used[i] * r.n_tokens[i];
        }
        if (n_ids != r.n_ids) {
            throw Error(MOEGGUF_INVALID, "the events need " + std::to_string(n_ids) + " expert ids in total, not " +
                                             std::to_string(r.n_ids));
        }
        if (r.compute_ns && !c.store.shared.has(MOEGGUF_SIMULATE)) {
            throw Error(MOEGGUF_INVALID, "only a simulation has a modelled clock; leave the compute times out");
        }
        replay(c, r, *n_done);
        check_failure(c);
    });
}

int moegguf_context_awaits_tokens(moegguf_store * store, int32_t sequence, int32_t phase) {
    return store->store.awaits_tokens(sequence, phase);
}

int moegguf_context_announce(moegguf_store * store, const moegguf_tokens_event * tokens) {
    return on(store, [&](Store & s) {
        const moegguf_tokens_event & event = given(tokens);
        const auto known = [](int32_t phase) { return phase == MOEGGUF_PREFILL || phase == MOEGGUF_DECODE; };
        if (event.n_tokens < 0 || (event.n_tokens > 0 && !event.tokens) || !known(event.phase)) {
            throw Error(MOEGGUF_INVALID, "an announcement must have its tokens and a phase, prefill or decode");
        }
        if (!event.sequences != !event.phases || !event.sequences != !event.outputs ||
            (event.phases && !std::all_of(event.phases, event.phases + event.n_tokens, known))) {
            throw Error(
                MOEGGUF_INVALID,
                "sequences, phases and outputs must be given together, and each phase must be prefill or decode");
        }
        s.announce_tokens(event);
    });
}

int moegguf_context_is_clear(moegguf_store * store) { return store->store.is_clear(); }

int moegguf_context_failure(moegguf_store * store, moegguf_failure * failure, int clear) {
    return guarded([&] { given(store).store.take_failure(given(failure), clear); });
}

} // extern "C"
