// store.h: the expert store: its parts, put together, and the barrier between the router's choice and the
// multiplication (acquire.cpp). Each part is described in its own header, and the C ABI in moegguf.h.
#pragma once

#include "events.h"
#include "forecaster.h"
#include "supply.h"

namespace moegguf {

// A buffer type that only reserves address space (hook.cpp); Store's own.
std::shared_ptr<ggml_backend_buffer_type> make_reserved_buft(Store * store);

class Store {
  public:
    explicit Store(const moegguf_config & config);
    ~Store();

    // A routing event, on a compute thread: the experts of the choice become slots in place. When it ends, every chosen
    // expert is where the layer's kernels find it, or the context says why not and the ids are safe to compute with. It
    // chooses a supply for the event, waits for the choice's wait_kinds and notifies observers; it neither moves bytes
    // nor changes a slot itself.
    void acquire(const Choice & choice);

    // True where every expert of the layer is in its own slot, so that a routing event has nothing to do or to report.
    // No lock.
    bool idle(int il) const;
    // Counts such an event. Its ids are not known: they count as distinct, as many as the layer has experts at most.
    void count_idle(int il, int n_expert_used, int n_tokens);

    // True where graphs that are built now multiply with the router's own ids in the layers of this device.
    bool passes_over(const Tier & tier) const;
    uint64_t passed_over() const; // a bit for each such device: a graph serves while they are the same
    // Counts an event of such a layer. The pass fails where it was cancelled, or where slots are not the experts' own.
    void pass_over(int il, int n_expert_used, int n_tokens);

    // The pass must end: it failed, was cancelled, or what its layer waits for could not be read. The thread that
    // computes calls this after every node: no lock unless something failed.
    bool must_abort();
    bool is_clear() const; // take_failure() has no failure to return and no slot to unpin; no lock
    void take_failure(moegguf_failure & out, bool clear);

    // Returns whether the tokens that come next have to be announced; those before are forgotten. No lock.
    bool awaits_tokens(int sequence, int phase);
    void announce_tokens(const moegguf_tokens_event & event);

    void watch(bool on) { watched_ = on; }   // on: no layer is idle, so that activity is complete
    void resize(Tier & tier, int n_slots);   // no pass is under way
    std::vector<Tier *> tiers_at(int index); // enum moegguf_tier; all of them one kind. Throws Error(INVALID).
    ggml_backend_buffer_type_t buft() { return buft_.get(); }
    ggml_tensor * pool_tensor(const char * name, int n_tokens) const;

    // The parts. Each is used by those that follow.
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
