// store.h: the expert store: its parts, put together. What each does is said in its own header, and what may be asked
// of all of them in moegguf.h.
#pragma once

#include "events.h"
#include "forecaster.h"
#include "supply.h"

namespace moegguf {

// A buffer type that only reserves address space (hook.cpp); Store's own.
std::shared_ptr<ggml_backend_buffer_type> make_reserved_buft(Store * store);

// The barrier between the router's choice and the multiplication. When it ends, every chosen expert is where the
// layer's kernels find it, or the context says why not and the ids are safe to compute with. It chooses a supply for
// each routing event and tells observers of it; it changes the sizes of pools between passes. It neither moves bytes
// nor changes a slot itself.
class Acquire {
  public:
    explicit Acquire(Store & store) : store_(store) {}

    bool is_clear(const Context & context) const; // take_failure has nothing to tell or to give back; no lock
    void take_failure(Context & context, moegguf_failure & out, bool clear);
    // Whether the tokens that come next have to be announced; those before are forgotten. No lock.
    bool awaits_tokens(Context & context, int sequence, int phase);
    void announce_tokens(Context & context, const moegguf_tokens_event & event);

    // A routing event, on a compute thread: the experts of the choice become slots in place. Waits for its wait_kinds.
    void acquire(Context & context, const Choice & choice);

    // The pass ends: it failed, was cancelled, or what its layer waits for could not be read. Asked after every node
    // that is computed, by the thread that computes: no lock unless something failed.
    bool must_abort(Context & context);

    // Nothing to do or to report at this layer: every expert is in its own slot. No lock.
    bool idle(int il) const;
    // The ids are not known: choices count as distinct ones, as many as the layer has experts at most.
    void count_idle(Context & context, int il, int n_expert_used, int n_tokens);

    void watch(bool on) { watched_ = on; } // on: no layer is idle, so that activity is complete
    void resize(Tier & tier, int n_slots); // no pass is under way

  private:
    void begin_event(Context & context, const Choice & choice, Lock & lock);

    Store & store_;
    std::atomic<bool> watched_{false};
};

class Store {
  public:
    explicit Store(const moegguf_config & config);
    ~Store();

    // Each is used by those that follow.
    const Layout layout;
    Shared shared;
    Events events;
    Tiers tiers;
    Context context;
    const std::vector<std::unique_ptr<Copies>> copies; // to tiers that are filled from RAM
    Transfers transfers;
    Supply slots;
    const std::unique_ptr<Supply> streamed, staged;
    Forecaster forecaster;
    Acquire acquire;
    std::atomic<bool> has_graph{false}; // of a model, which is loaded by then

    ggml_backend_buffer_type_t buft() { return buft_.get(); }
    ggml_tensor * pool_tensor(const char * name, int n_tokens) const;

    std::vector<Tier *> tiers_at(int index); // enum moegguf_tier; all of them one kind. Throws Error(INVALID).

  private:
    void stop_links();

    const std::shared_ptr<ggml_backend_buffer_type> buft_;
};

} // namespace moegguf

struct moegguf_store {
    explicit moegguf_store(const moegguf_config & config) : store(config) {}
    moegguf::Store store;
};
