// supply.h: a supply makes the experts that a layer has chosen available to the layer's multiplications. There are
// three supplies: one slot for each expert (class Supply), a stream through a few slots (streamed_supply.cpp), and a
// staging tensor of the layer's full shape (staged_supply.cpp). Store::acquire chooses one supply for each routing
// event. To add a supply, write a class like these, construct it in store.cpp, and choose it in acquire.cpp. If a layer
// needs more slots at once than exist, the pass fails. moegguf/engine/solver.py plans passes that fit.
//
// A store has one context, because it serves one llama_context. The context is the state of this llama_context in the
// store: the announced tokens, the position in a pass, the routing event, the pinned slots, and the failure. Tokens are
// announced if the caller names them to the store before their pass (moegguf_context_announce).
//
// Every supply pins slots for a context, assigns slots to absent experts, and queues demands. If a tier is filled from
// RAM, the transfer queue finds the slots from which demanded experts are copied. Only the staged supply itself borrows
// and vacates slots. A supply reads no file. A context belongs to the compute thread, which also records the context's
// failures. Pins change under the store's lock.
#pragma once

#include "policies/policy.h"
#include "transfers.h"

#include "ggml-backend.h"

#include <map>
#include <string>

namespace moegguf {

class Store;
class Supply;

// The tokens that were last announced to the store. The next passes evaluate them in this order.
struct Announced {
    int sequence = -1;
    int phase = MOEGGUF_PREFILL;
    int n_tokens = 0;
    int next = 0;                   // index of the first token after the passes that have begun
    std::vector<int32_t> sequences; // [n_tokens] sequence of each token; empty: all tokens have `sequence`
    std::vector<int32_t> phases;    // [n_tokens] phase of each token; empty: all tokens have `phase`
    std::vector<int32_t> outputs;   // [n_tokens] 1: the token's logits are needed; empty if `sequences` is empty
};

struct Pass {
    static constexpr int none = INT32_MAX; // value of `il` between passes: the next layer starts a pass

    int il = none; // layer that is being computed
    uint64_t number = 0;
    int n_tokens = 0;     // number of tokens of the pass; the last layer may be computed for fewer tokens
    bool decodes = false; // true: the pass has one token, or decodes one token of each of its sequences
    int n_experts = 0;    // number of experts that the layers have chosen so far, summed over layers
    // True: MOEGGUF_SWEEP is set, this pass and the previous pass have several tokens, and the previous pass used more
    // experts than there are usable slots.
    bool cycles = false;
    // Index of the pass's first token among the announced ones; -1: not all of its tokens were announced.
    int first_token = -1;
};

// A router's choice of experts at one layer, and how the caller will use the experts.
struct Choice {
    int il = -1;
    // [n_tokens][n_expert_used] expert ids; Store::acquire replaces them with slot ids unless experts are streamed.
    int32_t * ids = nullptr;
    int n_expert_used = 0;
    int n_tokens = 0;
    uint8_t wait_kinds = 0;    // bits of the matrices for which Store::acquire waits before it returns
    bool ids_in_place = false; // true: kernels read the ids from the memory at `ids`, not from a copy
    // The backend that runs the layer, if its stream can itself wait for copies. nullptr: the compute thread waits.
    ggml_backend_t stream = nullptr;
    const float * weights = nullptr;
    const float * inputs = nullptr; // [n_tokens][n_embd] router inputs; nullptr: not needed or not available
    int n_embd = 0;
    // Scores of the routers of the next n_scored layers with experts, [n_scored][n_tokens][n_expert of the layer], for
    // this layer's inputs. nullptr: the graph does not compute them.
    const float * scores = nullptr;
    int n_scored = 0;
};

struct Event : Choice {
    static constexpr int not_chosen = -1, no_slot_yet = -2; // values in slot_of for experts without a slot

    // Begins an event with this choice. Returns the address of the first id that is not an expert of the layer;
    // nullptr: all ids are valid.
    const int32_t * begin(const Choice & choice, int n_expert);

    LayerStep step;
    // True: the event has enough choices for nearly all experts of the layer (sweep_choices_per_expert).
    bool nearly_all = false;
    bool keeps_ids = false;         // true: kernels get expert ids instead of slot ids (streamed_supply.cpp)
    std::vector<int> experts;       // the chosen experts, in the order of their first choice
    std::vector<int> slot_of;       // [n_expert_max] slot of each expert; not_chosen or no_slot_yet: none
    std::vector<int32_t> sequences; // [n_tokens] sequence of each token, for observers; filled by gather_tokens()
    std::vector<int32_t> phases;    // [n_tokens] phase of each token, for observers; filled by gather_tokens()
    size_t n_ids() const { return (size_t)n_expert_used * n_tokens; }
};

// The slots that a context has pinned for one layer, all in one tier. pin(), unpin(), awaits_file() and noted() need
// the store's lock.
struct Pinned {
    Tier * tier = nullptr; // tier whose slots the layer uses; nullptr only in Context::late, before its first use
    std::vector<int> slots;
    uint8_t chunks = 0; // bits of the matrices that each expert of the layer has
    // Backend whose stream runs the layer and can wait for copies; nullptr: the compute thread waits.
    ggml_backend_t stream = nullptr;
    uint8_t ordered = 0; // bits of the matrices for which the stream already waits

    void pin(int s) {
        tier->pin(s);
        slots.push_back(s);
    }
    bool available(uint8_t kinds) const; // true: no slot failed, and missing() is 0 for all slots
    // True: for each slot, missing() is 0 or the slot failed.
    bool decided(uint8_t kinds) const;
    // True: a slot failed, or a matrix in `kinds` is absent and the stream does not wait for it.
    bool pending(uint8_t kinds) const;
    bool awaits_file(uint8_t kinds) const; // true: a matrix in `kinds` is neither in its slot nor in the slot's source
    bool noted() const;                    // true: the end of every copy for which the stream waits has been recorded
    void unpin();                          // unpins all slots

  private:
    // Returns the bits of `kinds` that are neither in slot s nor in a submitted copy for which the stream can wait.
    // Returns 0 for a slot of an expert stream.
    uint8_t missing(int s, uint8_t kinds) const;
};

struct Failure {
    std::atomic<bool> failed{false};
    moegguf_failure reason{};
    uint64_t read_errors = 0; // value of the store's counter read_errors at the last call of note_failures()
    uint64_t given_up = 0;    // value of Shared::given_up at the last call of note_failures()
    uint64_t lost_rows = 0;   // value of Shared::lost_rows at the last call of note_failures()
};

// Host memory for expert ids that are copied between a device and the compute thread, and for the scores that are
// copied with the ids. The memory is pinned if Remedy::pinned_ids is on and the device supports this. The device then
// copies directly.
class HostIds {
  public:
    // Returns memory for n ids and scores of a device. Calls for one device share the memory until a call needs more.
    // The earlier memory then stays allocated. Throws Error(MEMORY) if the system refuses memory.
    int32_t * space(ggml_backend_dev_t device, size_t n);

  private:
    // Each device's buffers; the last one is the largest.
    std::map<ggml_backend_dev_t, std::vector<ggml_backend_buffer_ptr>> memory_;
};

struct Context {
    Context(Store & store, Tier & tier, int n_expert_max);

    // Records a failure of the pass, unless an earlier failure has not been cleared. After a failure, Store::acquire
    // replaces all ids of the pass with 0.
    void fail(moegguf_status status, const std::string & why);
    void fail_forked() { fail(MOEGGUF_FORKED, forked_text); }
    bool failed() const { return failure.failed; }
    // Returns true if the counters of read errors, of kernels that stopped waiting, and of lost rows have not changed
    // since the last note_failures().
    bool noted(const Shared & shared) const {
        return failure.read_errors == get(shared.counters.read_errors) && failure.given_up == shared.given_up &&
               failure.lost_rows == shared.lost_rows;
    }
    // Fails the pass if a pinned slot has failed, or if a kernel has stopped waiting or did not get rows since the
    // last call. Needs the store's lock.
    void note_failures(const Shared & shared);

    // Waits until the copy thread has recorded the end of all copies for which the stream waits, or until the store is
    // cancelled. Unpins the slots in `late`. Without a cancellation, neither the next victim nor a failure of the pass
    // then depends on when the copy thread runs.
    void await_copies(Shared & shared, Lock & lock);
    void free_late(Shared & shared, Lock & lock);
    // Moves the pinned slots into `late` if the end of a copy into one of them has not been recorded. The next layer
    // then does not have to wait for the record. If `late` has slots, waits for their copies and unpins them first.
    void set_aside(Shared & shared, Lock & lock);

    // Fills event.sequences and event.phases. Returns false if the sequence of each token of the event is not known.
    bool gather_tokens(int n_event_tokens);
    bool has_one_token_each() const; // true: the announced batch decodes one token of each sequence in this pass

    Store & store;
    Announced announced;
    Pass pass;
    Event event;
    Pinned pinned;
    Pinned late; // pinned slots of an earlier layer, until the copy thread has recorded the end of their copies
    Supply * supply = nullptr; // supply of the last routing event, until its slots are unpinned; nullptr: none
    Failure failure;
    ggml_backend_sched_t scheduler = nullptr; // scheduler that runs the graph; nullptr: not known
    uint64_t passed_over = 0;                 // value of Store::passed_over() when the scheduler's graph was built
    int scored_layers = 0;                    // value of Forecaster::scored_layers() when that graph was built
    HostIds ids;                              // host copies of ids and scores that are in device memory
    std::vector<float> weights;               // host copy of routing weights that are in device memory
    std::vector<float> inputs;                // host copy of router inputs that are in device memory
};

// Supplies each expert in its own slot. An absent expert gets a free slot or the slot of a victim. This class serves
// all routing events of a single token, and all other events that are neither staged nor streamed.
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
    // have arrived.
    virtual bool computes_on_arrival(int /*il*/) const { return false; }

    // Callers of the following functions hold the store's lock.
    virtual bool can_stream(const Context &) const { return false; } // true: this supply can stream the event's experts
    // Called on the staged supply, and on no other, before place() is called on the supply of an event.
    virtual void observe(Context &, Lock &) {}
    virtual void drop_ahead() {} // drops transfers that were queued ahead for later layers
    // Pins the slots of the event's experts, assigns slots to experts that have none, and queues transfers of missing
    // matrices. May add to the matrices for which Store::acquire waits (event.wait_kinds). Releases the lock while it
    // waits. Returns false after a failure, which is recorded in the context.
    virtual bool place(Context & context, Lock & lock);
    // Unpins the slots of a layer that has been computed, or that will not be computed.
    virtual void release(Context & context);

    // The compute thread calls the following functions without the lock.
    // Waits until each slot has these matrices or has failed, or until the store is cancelled. Does not wait for
    // streamed experts, nor for submitted copies if the context has a stream: the stream then waits for them.
    virtual void wait(Context & context, uint8_t kinds);
    // Replaces the event's expert ids with slot ids; a stream leaves the expert ids unchanged.
    virtual void finish(Context & context);

  protected:
    // Looks up the event's experts, and pins at most `most` of those that have slots. All others count as misses. Must
    // be called before any victim is chosen, so that no expert of the event evicts another one.
    void pin_present(Context & context, int most);
    // Calls take() until it returns a slot, and waits between calls. Returns this slot, or -1 if no slot becomes
    // available.
    template <typename Take>
    int wait_for_slot(Context & context, Take take, Lock & lock);
    void fail_without_slot(Context & context);

    const Layout & layout_;
    Shared & shared_;
    Transfers & transfers_;
};

// The wait ends when take() returns a slot, when no transfer is under way, or when the store is cancelled. During the
// wait, slots become free only at the end of transfers. Prefetches are paused, so that they do not occupy these slots.
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

// The following two functions create the streamed and the staged supply. tier: the tier of the layers that the CPU
// runs; nullptr: none.
std::unique_ptr<Supply> make_streamed_supply(const Layout & layout, Shared & shared, Transfers & transfers,
                                             Tier * tier);
std::unique_ptr<Supply> make_staged_supply(const Layout & layout, Shared & shared, Transfers & transfers,
                                           Tiers & tiers);

} // namespace moegguf
