// store.h: the expert store, which puts its parts together, and the barrier between the router's choice and the
// multiplication (acquire.cpp). Each part has its own header. moegguf.h has the C ABI.
#pragma once

#include "events.h"
#include "forecaster.h"
#include "supply.h"

namespace moegguf {

// Makes a store's buffer type, which only reserves address space (hook.cpp).
std::shared_ptr<ggml_backend_buffer_type> make_reserved_buft(Store * store);

class Store {
  public:
    explicit Store(const moegguf_config & config);
    ~Store();

    // Handles a routing event on a compute thread, and replaces the expert ids of the choice by slot ids. At its end
    // every chosen expert has a slot, and the matrices of the choice's wait_kinds are there; kernels wait for the
    // others (arrivals.h). After a failure the context has the reason, and the ids are safe to compute with. The
    // function chooses a supply for the event, waits for the choice's wait_kinds and notifies observers. It neither
    // moves bytes nor changes a slot itself.
    void acquire(const Choice & choice);

    // Returns true if every expert of the layer is in its own slot, so that a routing event has nothing to do or to
    // report. Needs no lock.
    bool idle(int il) const;
    // Counts a routing event of an idle layer. Its ids are not known: they count as distinct, up to the layer's
    // experts.
    void count_idle(int il, int n_expert_used, int n_tokens);

    // Returns true if graphs that are built now multiply with the router's own ids in the layers of this device.
    bool passes_over(const Tier & tier) const;
    uint64_t passed_over() const; // a bit for each such device: a graph is valid while these bits stay the same
    // Counts an event of such a layer. The pass fails if it was cancelled, or if slots are not the experts' own.
    void pass_over(int il, int n_expert_used, int n_tokens);

    // Returns true if the pass must end: it failed, was cancelled, or a matrix of its layer could not be read. The
    // thread that computes calls this after every node. It takes no lock unless something failed.
    bool must_abort();
    bool is_clear() const; // take_failure() has no failure to return and no slot to unpin; no lock
    void take_failure(moegguf_failure & out, bool clear);

    // Returns whether the next tokens have to be announced, and forgets the tokens announced before. Needs no lock.
    bool awaits_tokens(int sequence, int phase);
    void announce_tokens(const moegguf_tokens_event & event);

    void watch(bool on) { watched_ = on; }   // while it is on no layer is idle, so that activity is complete
    void resize(Tier & tier, int n_slots);   // only while no pass is under way
    std::vector<Tier *> tiers_at(int index); // the tiers of an enum moegguf_tier. Throws Error(INVALID).
    ggml_backend_buffer_type_t buft() { return buft_.get(); }
    ggml_tensor * pool_tensor(const char * name, int n_tokens) const;

    // The parts. Each part uses only parts before it.
    const Layout layout;
    Shared shared;
    Events events;
    Tiers tiers;
    Context context;
    const std::vector<std::unique_ptr<Copies>> copies; // one for each tier that is filled from RAM
    Transfers transfers;
    Supply slots;
    const std::unique_ptr<Supply> streamed, staged;
    Forecaster forecaster;
    uint64_t n_bindings = 0; // grows before memory is bound to tensors that a graph which has run may multiply with

  private:
    void stop_links();
    void begin_event(const Choice & choice, Lock & lock);
    bool has_nothing_to_do(const Tier & tier) const;

    std::atomic<bool> watched_{false};
    const std::shared_ptr<ggml_backend_buffer_type> buft_;
};

} // namespace moegguf

struct moegguf_store {
    explicit moegguf_store(const moegguf_config & config) : store(config) {}
    moegguf::Store store;
};
