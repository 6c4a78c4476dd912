// supply.h: a supply brings a layer's experts to its multiplications in one pass: from slots of their own (Supply
// itself), streamed through a few slots (streamed_supply.cpp), or staged in a tensor of the layer's shape
// (staged_supply.cpp). Store::acquire chooses one for each routing event. The context is the llama_context as the store
// knows it: the tokens that were announced, its place in a pass, the routing event, the slots that it computes with,
// and why its pass failed.
//
// A supply may pin slots for a context, take slots for experts that are absent, and order transfers. It reads no file
// and copies nothing itself. A context belongs to the thread that computes; what is pinned changes, and failures are
// looked for, under the store's lock.
#pragma once

#include "policies/policy.h"
#include "transfers.h"

#include "ggml-backend.h"

#include <map>
#include <string>

namespace moegguf {

class Store;
class Supply;

// Tokens that come next, as announced, with those of them that no pass has taken yet.
struct Announced {
    int sequence = -1;
    int phase = MOEGGUF_PREFILL;
    int n_tokens = 0;
    int next = 0;                   // the first one that no pass has taken
    std::vector<int32_t> sequences; // [n_tokens], as phases and outputs, where there are several; else empty
    std::vector<int32_t> phases;
    std::vector<int32_t> outputs;
};

struct Pass {
    static constexpr int none = INT32_MAX; // any layer that comes next starts a pass

    int il = none; // the layer computing now
    uint64_t number = 0;
    int n_tokens = 0;     // its last layer may compute fewer
    bool decodes = false; // it has one token, or one of each sequence
    int n_experts = 0;    // so far, over all layers
    bool cycles = false;  // several tokens touch more experts than there are slots
    int first_token = -1; // of those announced; -1: these are others
};

// What the router chose at a layer, and how it is asked for.
struct Choice {
    int il = -1;
    int32_t * ids = nullptr; // [n_tokens][n_expert_used] experts; slots once they are served
    int n_expert_used = 0;
    int n_tokens = 0;
    uint8_t wait_kinds = 0;          // matrices that the caller waits for
    bool ids_in_place = false;       // kernels read them there
    ggml_backend_t stream = nullptr; // computes the layer, where it can wait for copies itself
    const float * weights = nullptr;
    const float * inputs = nullptr; // [n_tokens][n_embd]
    int n_embd = 0;
};

struct Event : Choice {
    static constexpr int not_chosen = -1, no_slot_yet = -2; // instead of a slot

    // Begins with this choice. Returns an id that is of no expert of the layer; nullptr: they all are.
    const int32_t * begin(const Choice & choice, int n_expert);

    LayerStep step;
    bool nearly_all = false;        // practically every expert of the layer is chosen
    bool keeps_ids = false;         // kernels are given experts instead of slots (streamed_supply.cpp)
    std::vector<int> experts;       // that were chosen, in order of first choice
    std::vector<int> slot_of;       // [n_expert_max]
    std::vector<int32_t> sequences; // [n_tokens], as phases: scratch for observers
    std::vector<int32_t> phases;
    size_t n_ids() const { return (size_t)n_expert_used * n_tokens; }
};

// Slots of one tier that a layer is computed with.
struct Pinned {
    Tier * tier = nullptr; // of the layer computing now, never nullptr
    std::vector<int> slots;
    uint8_t chunks = 0;              // matrices of that layer
    ggml_backend_t stream = nullptr; // computes it, and waits for copies itself; nullptr: the thread waits
    uint8_t ordered = 0;             // matrices that the stream waits for

    void pin(int s) {
        tier->residency.pin(s);
        slots.push_back(s);
    }
    bool available(uint8_t kinds) const;   // every matrix in `kinds` is there, and none failed. Any thread, as all here
    bool decided(uint8_t kinds) const;     // every such matrix is there, or will not come
    bool pending(uint8_t kinds) const;     // some are on their way, or failed, and the stream does not wait for them
    bool awaits_file(uint8_t kinds) const; // some are not even in RAM; under the store's lock
    bool noted() const;                    // none that the stream waits for is being copied; likewise
    void unpin();                          // all of them; likewise

  private:
    uint8_t missing(int s, uint8_t kinds) const;
};

struct Failure {
    std::atomic<bool> failed{false};
    moegguf_failure reason{};
    uint64_t read_errors = 0; // of the store, when this context's failures were last noted
    uint64_t given_up = 0;    // likewise
};

// Ids on their way between a device and the thread that computes: in memory that the device copies to and from by
// itself, where it has such memory.
class HostIds {
  public:
    // Returns memory for n ids of a device. It stays, also where a later call returns other memory. Throws
    // Error(MEMORY).
    int32_t * space(ggml_backend_dev_t device, size_t n);

  private:
    std::map<ggml_backend_dev_t, std::vector<ggml_backend_buffer_ptr>> memory_; // the last one is the largest
};

struct Context {
    Context(Store & store, Tier & tier, int n_expert_max);

    // The first failure of a pass is kept; from then on its slot ids are all 0.
    void fail(moegguf_status status, const std::string & why);
    void fail_forked() { fail(MOEGGUF_FORKED, forked_text); }
    bool failed() const { return failure.failed; }
    // Nothing has failed in the store since note_failures() looked, which does so under its lock.
    bool noted(const Shared & shared) const {
        return failure.read_errors == get(shared.counters.read_errors) && failure.given_up == shared.given_up;
    }
    void note_failures(const Shared & shared); // of what is pinned

    // Waits until the thread that copies has noted what streams waited for: neither what is evicted next nor whether
    // the pass has failed depends then on when that thread does so. Frees the slots of `late`.
    void await_copies(Shared & shared, Lock & lock);
    void free_late(Shared & shared, Lock & lock);
    void set_aside(Shared & shared, Lock & lock); // into `late`, what await_copies() would have to wait for

    bool gather_tokens(int n_event_tokens); // into event.sequences and phases; false: all are of announced.sequence
    bool has_one_token_each() const;        // the pass decodes one token of each of several sequences

    Store & store;
    Announced announced;
    Pass pass;
    Event event;
    Pinned pinned;
    Pinned late; // slots of an earlier layer of the pass, until the thread that copies has noted that they are there
    Supply * supply = nullptr; // of the layer computing now; nullptr: none holds anything for it
    Failure failure;
    ggml_backend_sched_t scheduler = nullptr; // that computes; nullptr: not known
    uint64_t passed_over = 0;                 // Store::passed_over() when its graph was built
    HostIds ids;                              // of devices whose memory is not the host's, as what follows
    std::vector<float> weights;
    std::vector<float> inputs;
};

// From slots: those that are there are used, and each of the others gets the slot of a victim. The supply of single
// tokens everywhere, and of prompts on the CPU that fit.
class Supply {
  public:
    Supply(const Layout & layout, Shared & shared, Transfers & transfers)
        : layout_(layout),
          shared_(shared),
          transfers_(transfers) {}
    virtual ~Supply() = default;
    Supply(const Supply &) = delete;
    Supply & operator=(const Supply &) = delete;

    // True where kernels wait by themselves for matrices of this layer: then nothing else has to, before they begin.
    virtual bool computes_on_arrival(int /*il*/) const { return false; }

    // Under the store's lock, by the thread that computes.
    virtual bool can_stream(const Context &) const { return false; } // the experts of the context's event
    virtual void observe(Context &, Lock &) {}                       // any event, whoever supplies it, before place()
    virtual void drop_ahead() {}                                     // what is on its way ahead will not come
    // Experts of the context's event that are there are pinned, slots taken for the others and transfers ordered; it
    // may raise the matrices that are to be waited for. The lock is free while it waits for slots. false: the context
    // says why.
    virtual bool place(Context & context, Lock & lock);
    // The layer has been computed, or will not be: what it holds is free.
    virtual void release(Context & context);

    // Without the lock, by the thread that computes.
    virtual void wait(Context & context, uint8_t kinds); // until these are there, or the context says why they are not
    virtual void finish(Context & context);              // kernels find the experts by the ids from here on

  protected:
    // Slots are pinned before any victim is chosen, so that no expert of the event is evicted for another of them. At
    // most so many are: the others count as absent.
    void pin_present(Context & context, int most);
    // What take() returns, once it finds a slot; -1: none becomes free.
    template <typename Take>
    int wait_for_slot(Context & context, Take take, Lock & lock);
    void fail_without_slot(Context & context);

    const Layout & layout_;
    Shared & shared_;
    Transfers & transfers_;
};

// Transfers end: nothing else makes slots free, and meanwhile no prefetch takes one.
template <typename Take>
int Supply::wait_for_slot(Context & context, Take take, Lock & lock) {
    int s = -1;
    const auto over = [&] {
        s = take();
        return s >= 0 || !transfers_.reading();
    };
    if (!over()) {
        transfers_.pause_prefetch(true);
        stall(shared_, *context.pinned.tier, lock, over);
        transfers_.pause_prefetch(false);
    }
    return s;
}

// tier: in the CPU's memory; nullptr: none.
std::unique_ptr<Supply> make_streamed_supply(const Layout & layout, Shared & shared, Transfers & transfers,
                                             Tier * tier);
std::unique_ptr<Supply> make_staged_supply(const Layout & layout, Shared & shared, Transfers & transfers,
                                           Tiers & tiers);

} // namespace moegguf
