// supply.h: a supply brings a layer's experts to its multiplications in one pass. There are three supplies: slots of
// the experts' own (Supply itself), a stream through a few slots (streamed_supply.cpp), and a staging tensor of the
// layer's shape (staged_supply.cpp). Store::acquire chooses one for each routing event. The context is the
// llama_context as the store knows it: the announced tokens, the place in a pass, the routing event, the pinned slots,
// and the failure.
//
// A supply may pin slots for a context, assign slots to absent experts, and order transfers. It reads no file and
// copies nothing itself. A context belongs to the thread that computes. Pins change, and failures are noted, under the
// store's lock.
#pragma once

#include "policies/policy.h"
#include "transfers.h"

#include "ggml-backend.h"

#include <map>
#include <string>

namespace moegguf {

class Store;
class Supply;

// The announced tokens that passes are about to take.
struct Announced {
    int sequence = -1;
    int phase = MOEGGUF_PREFILL;
    int n_tokens = 0;
    int next = 0;                   // index of the first token that no pass has taken
    std::vector<int32_t> sequences; // [n_tokens] of a batch with several sequences; else empty
    std::vector<int32_t> phases;    // [n_tokens] likewise
    std::vector<int32_t> outputs;   // [n_tokens] likewise
};

struct Pass {
    static constexpr int none = INT32_MAX; // any layer that comes next starts a pass

    int il = none; // the layer computing now
    uint64_t number = 0;
    int n_tokens = 0;     // the last layer may compute fewer tokens
    bool decodes = false; // the pass has one token, or one token of each sequence
    int n_experts = 0;    // experts chosen so far, over all layers
    bool cycles = false;  // the pass has several tokens, which use more experts than there are slots
    int first_token = -1; // index of the first token among the announced ones; -1: its tokens were not announced
};

// A router's choice at one layer, and the way in which the caller needs the experts.
struct Choice {
    int il = -1;
    int32_t * ids = nullptr; // [n_tokens][n_expert_used] expert ids, replaced by slot ids once the slots are known
    int n_expert_used = 0;
    int n_tokens = 0;
    uint8_t wait_kinds = 0;          // matrices that the caller waits for
    bool ids_in_place = false;       // kernels read the ids from this memory
    ggml_backend_t stream = nullptr; // the stream that computes the layer, if it can wait for copies itself
    const float * weights = nullptr;
    const float * inputs = nullptr; // [n_tokens][n_embd]
    int n_embd = 0;
};

struct Event : Choice {
    static constexpr int not_chosen = -1, no_slot_yet = -2; // values of slot_of that are no slots

    // Begins an event with this choice. Returns the first id that is no expert of the layer; nullptr: all are.
    const int32_t * begin(const Choice & choice, int n_expert);

    LayerStep step;
    bool nearly_all = false;        // nearly every expert of the layer is chosen
    bool keeps_ids = false;         // kernels get expert ids instead of slot ids (streamed_supply.cpp)
    std::vector<int> experts;       // the chosen experts, in the order of their first choice
    std::vector<int> slot_of;       // [n_expert_max] slot of each expert
    std::vector<int32_t> sequences; // [n_tokens] scratch for observers
    std::vector<int32_t> phases;    // [n_tokens] scratch for observers
    size_t n_ids() const { return (size_t)n_expert_used * n_tokens; }
};

// The slots of one tier that the present layer is computed with. Any thread may call the functions, unless they need
// the store's lock.
struct Pinned {
    Tier * tier = nullptr; // tier of the layer that computes now, never nullptr
    std::vector<int> slots;
    uint8_t chunks = 0;              // bits of the matrices that the layer has
    ggml_backend_t stream = nullptr; // stream that computes the layer and waits for copies; nullptr: the thread waits
    uint8_t ordered = 0;             // bits of the matrices that the stream waits for

    void pin(int s) {
        tier->residency.pin(s);
        slots.push_back(s);
    }
    bool available(uint8_t kinds) const;   // every matrix in `kinds` is there, and none failed
    bool decided(uint8_t kinds) const;     // every matrix in `kinds` is there, or will not come
    bool pending(uint8_t kinds) const;     // some are on their way, or failed, and the stream does not wait for them
    bool awaits_file(uint8_t kinds) const; // some are not even in RAM; needs the store's lock
    bool noted() const;                    // no matrix that the stream waits for is being copied; needs the lock
    void unpin();                          // unpins all slots; needs the lock

  private:
    uint8_t missing(int s, uint8_t kinds) const;
};

struct Failure {
    std::atomic<bool> failed{false};
    moegguf_failure reason{};
    uint64_t read_errors = 0; // the store's read errors when this context's failures were last noted
    uint64_t given_up = 0;    // Shared::given_up at that time
};

// Memory for ids on their way between a device and the thread that computes. It is pinned memory where the device has
// some, so that the device copies to and from it by itself.
class HostIds {
  public:
    // Returns memory for n ids of a device. The memory stays valid, also if a later call returns other memory. Throws
    // Error(MEMORY).
    int32_t * space(ggml_backend_dev_t device, size_t n);

  private:
    std::map<ggml_backend_dev_t, std::vector<ggml_backend_buffer_ptr>> memory_; // the last one is the largest
};

struct Context {
    Context(Store & store, Tier & tier, int n_expert_max);

    // Notes a failure of the pass. The first failure of a pass is kept. From then on its slot ids are all 0.
    void fail(moegguf_status status, const std::string & why);
    void fail_forked() { fail(MOEGGUF_FORKED, forked_text); }
    bool failed() const { return failure.failed; }
    // Returns true if nothing has failed in the store since note_failures() was called.
    bool noted(const Shared & shared) const {
        return failure.read_errors == get(shared.counters.read_errors) && failure.given_up == shared.given_up;
    }
    void note_failures(const Shared & shared); // notes failures of pinned slots, under the store's lock

    // Waits until the copy thread has noted the copies that streams waited for, and frees the slots of `late`.
    // Afterwards neither the next victim nor a failure of the pass depends on the time at which that thread runs.
    void await_copies(Shared & shared, Lock & lock);
    void free_late(Shared & shared, Lock & lock);
    void set_aside(Shared & shared, Lock & lock); // moves the slots that await_copies() would wait for into `late`

    bool gather_tokens(int n_event_tokens); // fills event.sequences and phases; false: all belong to one sequence
    bool has_one_token_each() const;        // the pass decodes one token of each of several sequences

    Store & store;
    Announced announced;
    Pass pass;
    Event event;
    Pinned pinned;
    Pinned late; // slots of an earlier layer of the pass, until the copy thread has noted that their matrices are there
    Supply * supply = nullptr; // supply of the layer that computes now; nullptr: no supply has slots for it
    Failure failure;
    ggml_backend_sched_t scheduler = nullptr; // the scheduler that computes; nullptr: not known
    uint64_t passed_over = 0;                 // Store::passed_over() when the scheduler's graph was built
    HostIds ids;                              // copies of a device's ids, if its memory is not the host's
    std::vector<float> weights;               // copy of a device's routing weights, likewise
    std::vector<float> inputs;                // copy of a device's router inputs, likewise
};

// Supplies experts from slots of their own: experts that are there are used, and every absent expert gets the slot of a
// victim. This is the supply of single tokens everywhere, and of prompts that fit on the CPU.
class Supply {
  public:
    Supply(const Layout & layout, Shared & shared, Transfers & transfers)
        : layout_(layout),
          shared_(shared),
          transfers_(transfers) {}
    virtual ~Supply() = default;
    Supply(const Supply &) = delete;
    Supply & operator=(const Supply &) = delete;

    // Returns true if kernels themselves wait for matrices of this layer, so that nothing has to wait before they
    // begin.
    virtual bool computes_on_arrival(int /*il*/) const { return false; }

    // The thread that computes calls these under the store's lock.
    virtual bool can_stream(const Context &) const { return false; } // can stream the experts of the context's event
    virtual void observe(Context &, Lock &) {}                       // is called at every event, before place()
    virtual void drop_ahead() {}                                     // drops transfers for later layers
    // Pins the experts of the context's event that are there, assigns slots to the others and orders their transfers.
    // It may raise the matrices that the caller waits for. The lock is free while it waits for slots. Returns false
    // after a failure, which the context then has.
    virtual bool place(Context & context, Lock & lock);
    // Frees the slots of a layer that has been computed, or will not be computed.
    virtual void release(Context & context);

    // The thread that computes calls these without the lock.
    virtual void wait(Context & context, uint8_t kinds); // waits for these matrices, or for the context's failure
    virtual void finish(Context & context);              // afterwards kernels find the experts by the ids

  protected:
    // Pins the experts of the event that are there, up to `most`; further experts count as absent. This happens before
    // any victim is chosen, so that no expert of the event is evicted for another one.
    void pin_present(Context & context, int most);
    // Calls take() until it returns a slot, and returns the slot; -1: no slot becomes free.
    template <typename Take>
    int wait_for_slot(Context & context, Take take, Lock & lock);
    void fail_without_slot(Context & context);

    const Layout & layout_;
    Shared & shared_;
    Transfers & transfers_;
};

// Only the end of a transfer makes a slot free. Prefetches are paused meanwhile, so that none takes the slot.
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

// tier: the tier in the CPU's memory; nullptr: none.
std::unique_ptr<Supply> make_streamed_supply(const Layout & layout, Shared & shared, Transfers & transfers,
                                             Tier * tier);
std::unique_ptr<Supply> make_staged_supply(const Layout & layout, Shared & shared, Transfers & transfers,
                                           Tiers & tiers);

} // namespace moegguf
