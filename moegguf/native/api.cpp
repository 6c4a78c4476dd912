// api.cpp: the C ABI over the store. The only place where exceptions become status codes.
#include "store.h"

#include <cstring>
#include <new>

using namespace moegguf;

namespace {

thread_local std::string last_error;

template <typename F>
int guarded(F && body) {
    try {
        body();
        last_error.clear();
        return MOEGGUF_OK;
    } catch (const Error & e) {
        last_error = e.what();
        return e.status;
    } catch (const std::bad_alloc &) {
        last_error = "out of memory";
        return MOEGGUF_MEMORY;
    } catch (const std::exception & e) {
        last_error = e.what();
        return MOEGGUF_INVALID;
    }
}

template <typename T>
T & given(T * pointer) {
    if (!pointer) {
        throw Error(MOEGGUF_INVALID, "a pointer is null that must not be");
    }
    return *pointer;
}

template <typename F>
int on(moegguf_store * store, F && body) {
    return guarded([&] {
        if (!store) {
            throw Error(MOEGGUF_INVALID, "no store");
        }
        if (store->store.forked()) {
            throw Error(MOEGGUF_FORKED, "the model was loaded in the parent process; load it again in this one");
        }
        body(store->store);
    });
}

} // namespace

extern "C" {

uint32_t moegguf_abi_version(void) {
    return MOEGGUF_ABI_VERSION;
}

const char * moegguf_last_error(void) {
    return last_error.c_str();
}

int moegguf_store_open(const moegguf_config * config, moegguf_store ** store) {
    return guarded([&] {
        if (!config || config->abi != MOEGGUF_ABI_VERSION) {
            throw Error(MOEGGUF_INVALID, "the library speaks ABI " + std::to_string(MOEGGUF_ABI_VERSION));
        }
        given(store) = new moegguf_store(*config);
    });
}

void moegguf_store_close(moegguf_store * store) {
    if (store && !store->store.forked()) { // in a child the locks and threads are the parent's: leave them
        delete store;
    }
}

ggml_backend_buffer_type_t moegguf_store_buft(moegguf_store * store) {
    return store ? store->store.buft() : nullptr;
}

int moegguf_store_info(moegguf_store * store, moegguf_pool_info * info) {
    return on(store, [&](Store & s) { s.info(given(info)); });
}

int moegguf_store_counters(moegguf_store * store, moegguf_counters * counters) {
    return on(store, [&](Store & s) { s.counters(given(counters)); });
}

int moegguf_store_residency(moegguf_store * store, uint8_t * map, size_t n) {
    return on(store, [&](Store & s) { s.residency(&given(map), n); });
}

int moegguf_store_activity(moegguf_store * store, uint32_t * uses, uint32_t * loads, size_t n) {
    return on(store, [&](Store & s) { s.activity(&given(uses), &given(loads), n); });
}

int moegguf_store_watch(moegguf_store * store, int watched) {
    return on(store, [&](Store & s) { s.watch(watched != 0); });
}

int moegguf_store_set_scores(moegguf_store * store, const float * scores, size_t n) {
    return on(store, [&](Store & s) { s.set_scores(scores, n); });
}

int moegguf_store_set_rates(moegguf_store * store, const moegguf_rates * rates) {
    return on(store, [&](Store & s) { s.set_rates(rates); });
}

int moegguf_store_prefetch(moegguf_store * store, const int32_t * il, const int32_t * experts, size_t n) {
    return on(store, [&](Store & s) {
        if (n > 0) {
            s.prefetch(&given(il), &given(experts), n);
        }
    });
}

int moegguf_store_listen(moegguf_store * store, const moegguf_listener * listener) {
    return on(store, [&](Store & s) { s.listen(listener); });
}

int moegguf_store_cancel(moegguf_store * store, int cancel) {
    return on(store, [&](Store & s) { s.cancel(cancel); });
}

int moegguf_store_resize(moegguf_store * store, int32_t n_slots) {
    return on(store, [&](Store & s) { s.resize(n_slots); });
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

int moegguf_store_probe(moegguf_store * store, double seconds, double * bytes_per_s) {
    return on(store, [&](Store & s) { given(bytes_per_s) = s.probe(seconds); });
}

int moegguf_store_sim_advance(moegguf_store * store, uint64_t ns) {
    return on(store, [&](Store & s) { s.advance(ns); });
}

int moegguf_lane_open(moegguf_store * store, moegguf_lane ** lane) {
    return on(store, [&](Store & s) { given(lane) = new moegguf_lane{s.open_lane()}; });
}

void moegguf_lane_close(moegguf_lane * lane) {
    if (lane && !lane->lane->store.forked()) {
        lane->lane->store.close_lane(*lane->lane);
        delete lane;
    }
}

int moegguf_lane_gate(moegguf_lane * lane, int32_t il, const int32_t * expert_ids, int32_t n_expert_used,
                      int32_t n_tokens, int32_t * slot_ids) {
    return guarded([&] {
        constexpr int32_t most_tokens = 1 << 24;
        Lane & l = *given(lane).lane;
        if (!expert_ids || !slot_ids || n_expert_used < 1 || n_expert_used > l.store.layout().n_expert_max ||
            n_tokens < 1 || n_tokens > most_tokens) {
            throw Error(MOEGGUF_INVALID, "a gate needs ids of at least one token, and no more per token than experts");
        }
        memcpy(slot_ids, expert_ids, sizeof(int32_t) * n_expert_used * n_tokens);
        l.store.gate(l, il, slot_ids, n_expert_used, n_tokens, all_kinds);
        if (l.failed) {
            throw Error((moegguf_status)l.failure.status, l.failure.message);
        }
    });
}

int moegguf_lane_announce(moegguf_lane * lane, int32_t sequence, int32_t phase, const int32_t * tokens,
                          int32_t n_tokens) {
    return guarded([&] {
        if (n_tokens < 0 || (n_tokens > 0 && !tokens) || phase < MOEGGUF_PREFILL || phase > MOEGGUF_DECODE) {
            throw Error(MOEGGUF_INVALID, "an announcement has a phase and its tokens");
        }
        Lane & l = *given(lane).lane;
        l.store.announce_tokens(l, {l.id, sequence, phase, n_tokens, tokens});
    });
}

int moegguf_lane_failure(moegguf_lane * lane, moegguf_failure * failure, int clear) {
    return guarded([&] { given(lane).lane->store.take_failure(*lane->lane, given(failure), clear); });
}

void moegguf_lane_chain(moegguf_lane * lane, ggml_backend_sched_eval_callback next, void * user) {
    lane->lane->next_eval = next;
    lane->lane->next_user = user;
}

} // extern "C"
