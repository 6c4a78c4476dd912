// store.h: the expert store, which owns its parts and connects them. There is one object for each kind of supply, and
// one context. The store's function acquire() runs between a router's choice and the multiplications of the chosen
// experts (acquire.cpp). The included headers declare the parts. moegguf.h declares the C ABI.
#pragma once

#include "events.h"
#include "forecaster.h"
#include "mapped.h"
#include "router_scores.h"
#include "row_tables.h"
#include "supply.h"

namespace moegguf {

// Creates the store's ggml buffer type, which only reserves address space for expert tensors (hook.cpp).
std::shared_ptr<ggml_backend_buffer_type> make_reserved_buft(Store * store);

class Store {
  public:
    explicit Store(const moegguf_config & config);
    ~Store();

    // Handles a routing event on a compute thread: chooses a supply, notifies observers, waits for the choice's
    // wait_kinds, and replaces expert ids with slot ids (except in an expert stream).
    //
    // After the call, every chosen expert has a slot or is streamed, and the matrices of wait_kinds have arrived, or
    // the compute stream waits for their copies. Kernels (arrivals.h) or the hook wait for all other matrices. After a
    // failure, the context holds the reason, and all ids are 0, which is safe to compute with. The chosen supply, not
    // this function, changes slots and queues transfers.
    void acquire(const Choice & choice);

    // Returns true if layer il is idle: its routing events need no work. This requires that all experts of all layers
    // in this layer's tier are complete in their own slots. No listener may be registered, and watching (watch()) must
    // be off. In addition, the store must not be cancelled, and this must not be a forked child process. Needs no lock.
    bool idle(int il) const;
    // Counts a routing event of an idle layer. The chosen experts are not known. Each choice counts as a different
    // expert, up to the layer's number of experts.
    void count_idle(int il, int n_expert_used, int n_tokens);

    // Returns true if graphs that are built now use the router's own expert ids in the layers of this tier. This
    // requires that Remedy::shared_ids is on, every expert is complete in its own slot, and neither a listener nor
    // watch() needs the routing events.
    bool passes_over(const Tier & tier) const;
    // Returns a set of bits, one for each device: 1 if passes_over() is true for the device's tier. A graph multiplies
    // by the right ids while these bits stay the same.
    uint64_t passed_over() const;
    // Counts a routing event of a layer whose graph uses the router's own expert ids. Fails the pass in a child
    // process, after a cancellation, or if experts no longer have their own slots.
    void pass_over(int il, int n_expert_used, int n_tokens);

    // Returns true if graphs that are built now look up the slot ids of layer il on the device (mapped.h).
    bool maps(int il, int n_tokens) const {
        return mapped && mapped->on() && n_tokens <= Mapped::most_tokens && &tiers.of(il, n_tokens) == &tiers.of(il);
    }
    // Prepares the kernels of such a layer, which have not started yet. Fails the pass in a child process, or after a
    // cancellation.
    void pass_mapped(const Mapped::Passed & layer, ggml_backend_t backend);
    // Counts the routing events in the log, and promotes experts. Does nothing if the log has been read. Only the
    // compute thread calls this, between passes.
    void end_mapped();

    // Returns true if the pass must end: the pass failed, the store was cancelled, or a matrix of the current layer did
    // not arrive. ggml calls this between nodes. It takes no lock unless something failed.
    bool must_abort();
    bool is_clear() const; // true: take_failure() has no failure to return and no slot to unpin; needs no lock
    void take_failure(moegguf_failure & out, bool clear);

    // Returns true if the next tokens have to be announced. Otherwise they belong to this sequence and phase. Forgets
    // the previously announced tokens, unless slots are mapped. Needs no lock.
    bool awaits_tokens(int sequence, int phase);
    void announce_tokens(const moegguf_tokens_event & event);

    void watch(bool on) { watched_ = on; } // while on, no layer is idle, so that every look-up is counted
    void resize(Tier & tier, int n_slots); // changes the number of slots; no pass may be under way
    // Returns the tiers for a value of enum moegguf_tier. Throws Error(INVALID).
    std::vector<Tier *> tiers_at(int index);
    ggml_backend_buffer_type_t buft() { return buft_.get(); }
    ggml_tensor * pool_tensor(const char * name, int n_tokens) const;

    // The parts of the store. Each part except the context uses only parts that are declared before it.
    const Layout layout;
    Shared shared;
    Events events;
    Tiers tiers;
    Context context;
    const std::vector<std::unique_ptr<Copies>> copies; // one link for each tier that is filled from RAM
    Transfers transfers;
    RowTables row_tables;
    Supply slots;
    const std::unique_ptr<Supply> streamed, staged;
    Forecaster forecaster;
    RouterScores router_scores;
    const std::unique_ptr<Mapped> mapped; // nullptr: every pass stops at each layer
    // A counter that increases before a resize changes pool tensors, which makes all earlier graphs invalid.
    uint64_t n_bindings = 0;

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
