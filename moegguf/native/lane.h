// lane.h: what one llama_context holds of a store: its pins, its place in a pass, and why its pass failed.
#pragma once

#include "expert_chain.h"

#include "ggml-backend.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace moegguf {

class Store;
class Tier;
struct MissedJob;

// Belongs to the thread that computes; pins change under the store's lock.
struct Lane {
    static constexpr int between_passes = INT32_MAX; // any layer that comes next starts a pass
    static constexpr int not_chosen = -1, no_slot_yet = -2, computed_below = -3; // instead of a slot

    Lane(Store & store, Tier & tier, int id, int n_expert_max)
        : store(store),
          id(id),
          tier(&tier),
          slot_of(n_expert_max, not_chosen) {
        pinned.reserve(n_expert_max);
        distinct.reserve(n_expert_max);
        absent.reserve(n_expert_max);
    }

    // The first failure of a pass is kept; from then on its slot ids are all 0.
    void fail(moegguf_status status, int il, int expert, const std::string & why);

    bool has_one_token_each() const;
    bool staged() const;             // the layer computing now (staging.h)
    bool gather(int n_event_tokens); // into event_sequences and event_phases; false: all tokens are of `sequence`

    Store & store;
    const int id;
    int il = between_passes; // the layer computing now
    uint64_t pass = 0;
    int n_tokens = 0;     // of the pass: its last layer may compute fewer
    bool decodes = false; // it has one token, or one of each sequence
    int n_experts = 0;    // of the pass so far, over all layers
    bool cycles = false;  // a pass of several tokens touches more experts than there are slots
    int sequence = -1;    // as announced, with the phase and the tokens that no pass has taken yet
    int phase = MOEGGUF_PREFILL;
    int first_token = -1;
    int next_token = 0;
    int n_announced = 0;
    std::vector<int32_t> sequences; // [n_announced], as phases and outputs, where there are several; else empty
    std::vector<int32_t> phases;
    std::vector<int32_t> outputs;
    std::vector<int32_t> event_sequences; // [n_tokens] of an event, as event_phases: scratch
    std::vector<int32_t> event_phases;
    Tier * tier;             // of the layer computing now, never nullptr
    std::vector<int> pinned; // slots there, all of one layer
    uint8_t chunks = 0;      // matrices of that layer: an announcement changes il, and not what is waited for
    ggml_backend_sched_t scheduler = nullptr; // that computes; nullptr: not known
    ggml_backend_t stream = nullptr; // computes this layer, and waits for copies itself; nullptr: the thread waits
    uint8_t ordered = 0;             // matrices of that layer that the stream waits for
    std::vector<int> distinct;       // experts of this routing event, in order of first choice
    std::vector<int> slot_of;        // [n_expert_max], of this event
    // Of this event's layer; nullptr: the device has to compute every expert.
    const ExpertChain * chain = nullptr;
    MissedJob * missed = nullptr;      // experts of this event that the CPU computes; nullptr: none
    std::vector<int> stand_ins;        // slots whose products are replaced by the CPU's
    std::vector<int> absent;           // experts of it that are streamed
    bool streams_experts = false;      // this event's ids are experts (streaming.h)
    uint64_t waited_ns = 0;            // at this event
    uint64_t read_errors = 0;          // of the store, when this lane's failures were last noted
    uint64_t given_up = 0;             // likewise
    const void * ids_memory = nullptr; // of this event's ids
    bool ids_in_place = false;         // kernels read them there
    std::vector<int32_t> ids;          // scratch for devices whose memory is not the host's
    std::vector<float> weights;
    std::vector<float> inputs;
    moegguf_failure failure{};
    std::atomic<bool> failed{false};
    ggml_backend_sched_eval_callback next_eval = nullptr;
    void * next_user = nullptr;
};

} // namespace moegguf

struct moegguf_lane {
    std::unique_ptr<moegguf::Lane> lane;
};
