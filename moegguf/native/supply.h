// supply.h: a supply brings a layer's experts to its multiplications in one pass. There are three supplies: one slot
// for each expert (class Supply), a stream through a few slots (streamed_supply.cpp), and a staging tensor of the
// layer's full shape (staged_supply.cpp). Store::acquire chooses one supply for each routing event.
//
// The context is the store's state for its llama_context: the announced tokens, the position in a pass, the routing
// event, the pinned slots, and the failure.
//
// A supply may pin slots for a context, assign slots to absent experts, and queue transfers. It reads no file and
// copies nothing itself. A context belongs to the compute thread, which also records the context's failures. Pins
// change under the store's lock.
#pragma once

#include "policies/policy.h"
#include "transfers.h"

#include "ggml-backend.h"

#include <map>
#include <string>

namespace moegguf {

class Store;
class Supply;

// The announced tokens. The next passes compute them in this order.
struct Announced {
    int sequence = -1;
    int phase = MOEGGUF_PREFILL;
    int n_tokens = 0;
    int next = 0;                   // index of the first token that no pass has computed yet
    std::vector<int32_t> sequences; // [n_tokens] sequence of each token, for a batch of several sequences; else empty
    std::vector<int32_t> phases;    // [n_tokens] phase of each token, for a batch of several sequences; else empty
    std::vector<int32_t> outputs;   // [n_tokens] 1: the token gets logits; empty for a single sequence
};

struct Pass {
    static constexpr int none = INT32_MAX; // value of `il` between passes: the next layer starts a pass

    int il = none; // layer that is computed now
    uint64_t number = 0;
    int n_tokens = 0;     // number of tokens of the pass; its last layer may be computed for fewer tokens
    bool decodes = false; // true: the pass has one token, or one token of each sequence
    int n_experts = 0;    // number of experts chosen so far, over all layers
    // True: this pass and the previous pass have several tokens, and the previous pass used more experts than there are
    // slots.
    bool cycles = false;
    int first_token = -1; // index of the pass's first token among the announced ones; -1: the tokens were not announced
};

// A router's choice of experts at one layer, and how the caller will use the experts.
struct Choice {
    int il = -1;
    int32_t * ids = nullptr; // [n_tokens][n_expert_used] expert ids; Store::acquire replaces them by slot ids
    int n_expert_used = 0;
    int n_tokens = 0;
    uint8_t wait_kinds = 0;    // bits of the matrices for which the caller waits
    bool ids_in_place = false; // true: kernels read the ids from the memory at `ids`, not from a copy
    // The backend that computes the layer, if its stream can itself wait for copies. nullptr: the compute thread waits.
    ggml_backend_t stream = nullptr;
    const float * weights = nullptr;
    const float * inputs = nullptr; // [n_tokens][n_embd] inputs of the router; nullptr: no observer needs them
    int n_embd = 0;
};

struct Event : Choice {
    static constexpr int not_chosen = -1, no_slot_yet = -2; // values in slot_of for experts without a slot

    // Begins an event with this choice. Returns the address of the first id that is not an expert of the layer;
    // nullptr: all ids are valid.
    const int32_t * begin(const Choice & choice, int n_expert);

    LayerStep step;
    bool nearly_all = false;        // true: nearly every expert of the layer is chosen
    bool keeps_ids = false;         // true: kernels get expert ids instead of slot ids (streamed_supply.cpp)
    std::vector<int> experts;       // the chosen experts, in the order of their first choice
    std::vector<int> slot_of;       // [n_expert_max] slot of each expert; not_chosen or no_slot_yet: none
    std::vector<int32_t> sequences; // [n_tokens] sequence of each token, for observers; filled by gather_tokens()
    std::vector<int32_t> phases;    // [n_tokens] phase of each token, for observers; filled by gather_tokens()
    size_t n_ids() const { return (size_t)n_expert_used * n_tokens; }
};

// The slots that a context has pinned for one layer, all in one tier. Any thread may call the functions, except those
// that need the store's lock.
struct Pinned {
    Tier * tier = nullptr; // tier in which the layer computes; never nullptr
    std::vector<int> slots;
    uint8_t chunks = 0; // bits of the matrices that each expert of the layer has
    // Backend whose stream computes and waits for copies; nullptr: the compute thread waits.
    ggml_backend_t stream = nullptr;
    uint8_t ordered = 0; // bits of the matrices for which the stream already waits

    void pin(int s) {
        tier->residency.pin(s);
        slots.push_back(s);
    }
    bool available(uint8_t kinds) const; // true: every matrix in `kinds` is there, and no slot failed
    // True: every matrix in `kinds` is there, or will not come because its slot failed.
    bool decided(uint8_t kinds) const;
    // True: a slot failed, or a matrix in `kinds` is absent and the stream does not wait for it.
    bool pending(uint8_t kinds) const;
    bool awaits_file(uint8_t kinds) const; // true: a matrix is neither in its slot nor in RAM; needs the store's lock
    bool noted() const; // true: no copy for which the stream waits is still under way; needs the lock
    void unpin();       // unpins all slots; needs the lock

  private:
    uint8_t missing(int s, uint8_t kinds) const;
};

struct Failure {
    std::atomic<bool> failed{false};
    moegguf_failure reason{};
    uint64_t read_errors = 0; // value of the store's counter read_errors in the last call of note_failures()
    uint64_t given_up = 0;    // value of Shared::given_up in the last call of note_failures()
};

// Host memory for expert ids that are copied between a device and the compute thread. The memory is pinned if the
// device supports this, so that the device copies by itself.
class HostIds {
  public:
    // Returns memory for n ids of a device. The memory stays valid, even if a later call returns other memory. Throws
    // Error(MEMORY) if the system refuses memory.
    int32_t * space(ggml_backend_dev_t device, size_t n);

  private:
    // Each device's buffers; the last one is the largest.
    std::map<ggml_backend_dev_t, std::vector<ggml_backend_buffer_ptr>> memory_;
};

struct Context {
    Context(Store & store, Tier & tier, int n_expert_max);

    // Records a failure of the pass. Only the first failure of a pass is kept. After a failure, all slot ids of the
    // pass are 0.
    void fail(moegguf_status status, const std::string & why);
    void fail_forked() { fail(MOEGGUF_FORKED, forked_text); }
    bool failed() const { return failure.failed; }
    // Returns true if note_failures() has seen every failure in the store.
    bool noted(const Shared & shared) const {
        return failure.read_errors == get(shared.counters.read_errors) && failure.given_up == shared.given_up;
    }
    // Records failures of pinned slots in the context; needs the store's lock.
    void note_failures(const Shared & shared);

    // Waits until the copy thread has recorded the end of all copies for which streams waited, and unpins the slots in
    // `late`. Afterwards neither the next victim nor a failure of the pass depends on when the copy thread runs.
    void await_copies(Shared & shared, Lock & lock);
    void free_late(Shared & shared, Lock & lock);
    // Moves the pinned slots into `late` if a copy into one of them is under way. Then the layer need not wait for the
    // copy's end.
    void set_aside(Shared & shared, Lock & lock);

    // Fills event.sequences and event.phases. Returns false if all tokens belong to one sequence.
    bool gather_tokens(int n_event_tokens);
    bool has_one_token_each() const; // true: the pass decodes one token of each of its sequences

    Store & store;
    Announced announced;
    Pass pass;
    Event event;
    Pinned pinned;
    Pinned late; // slots of an earlier layer in the pass, until the copy thread has recorded the end of their copies
    Supply * supply = nullptr; // supply of the layer that is computed now; nullptr: no slots are pinned
    Failure failure;
    ggml_backend_sched_t scheduler = nullptr; // scheduler that computes the graph; nullptr: not known
    uint64_t passed_over = 0;                 // value of Store::passed_over() when the scheduler's graph was built
    HostIds ids;                              // host copies of ids that lie in a device's memory
    std::vector<float> weights;               // host copy of routing weights that lie in a device's memory
    std::vector<float> inputs;                // host copy of router inputs that lie in a device's memory
};

// Supplies each expert in its own slot. An absent expert gets a free slot or the slot of a victim. This class supplies
// all passes of a single token, and every other pass that is neither staged nor streamed.
class Supply {
  public:
    Supply(const Layout & layout, Shared & shared, Transfers & transfers)
        : layout_(layout),
          shared_(shared),
          transfers_(transfers) {}
    virtual ~Supply() = default;
    Supply(const Supply &) = delete;
    Supply & operator=(const Supply &) = delete;

    // Returns true if kernels themselves wait for matrices of this layer, so that they can begin before all matrices
    // are there.
    virtual bool computes_on_arrival(int /*il*/) const { return false; }

    // The compute thread calls the next functions under the store's lock.
    virtual bool can_stream(const Context &) const { return false; } // true: streams the event's experts
    virtual void observe(Context &, Lock &) {}                       // is called at each event, before place()
    virtual void drop_ahead() {} // drops transfers that were queued ahead for later layers
    // Pins the event's experts that are there, assigns slots to the others, and queues their transfers. May add to the
    // matrices for which the caller waits (event.wait_kinds). The lock is free while the function waits for slots.
    // Returns false after a failure, which is recorded in the context.
    virtual bool place(Context & context, Lock & lock);
    // Unpins the slots of a layer that has been computed, or that will not be computed.
    virtual void release(Context & context);

    // The compute thread calls the next functions without the lock.
    virtual void wait(Context & context, uint8_t kinds); // waits until these matrices are there, or a slot failed
    virtual void finish(Context & context); // replaces expert ids by the ids with which kernels find the experts

  protected:
    // Pins the event's experts that are there, up to `most` of them; all others count as absent. Must be called before
    // any victim is chosen, so that no expert of the event evicts another expert of the event.
    void pin_present(Context & context, int most);
    // Calls take() again and again until it returns a slot, and returns this slot. Returns -1 if no slot becomes free.
    template <typename Take>
    int wait_for_slot(Context & context, Take take, Lock & lock);
    void fail_without_slot(Context & context);

    const Layout & layout_;
    Shared & shared_;
    Transfers & transfers_;
};

// The wait ends if take() returns a slot, or if no transfer is under way, because slots become free only at the end of
// transfers. Prefetches are paused meanwhile, so that they take no slot that becomes free.
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

// The next two functions make the streamed and the staged supply. tier: the tier in the CPU's memory; nullptr: none.
std::unique_ptr<Supply> make_streamed_supply(const Layout & layout, Shared & shared, Transfers & transfers,
                                             Tier * tier);
std::unique_ptr<Supply> make_staged_supply(const Layout & layout, Shared & shared, Transfers & transfers,
                                           Tiers & tiers);

} // namespace moegguf
