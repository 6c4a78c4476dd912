// acquire.h: the barrier between the router's choice and the multiplication: every chosen expert is in a slot, pinned
// and read, when it ends. Runs on compute threads.
#pragma once

#include "forecaster.h"
#include "lane.h"
#include "missed.h"
#include "staging.h"

namespace moegguf {

class Acquire {
  public:
    Acquire(Store & store, const Layout & layout, Shared & shared, Tiers & tiers, Streaming & streaming,
            Transfers & transfers, PromptStaging & staging, Forecaster & forecaster, Missed & missed, Events & events)
        : store_(store),
          layout_(layout),
          shared_(shared),
          tiers_(tiers),
          streaming_(streaming),
          transfers_(transfers),
          staging_(staging),
          forecaster_(forecaster),
          missed_(missed),
          events_(events) {}

    std::unique_ptr<Lane> open_lane();
    void close_lane(Lane & lane);
    bool is_clear(const Lane & lane) const; // take_failure has nothing to tell or to give back; no lock
    void take_failure(Lane & lane, moegguf_failure & out, bool clear);
    bool awaits_tokens(Lane & lane, int sequence, int phase);
    void announce_tokens(Lane & lane, const moegguf_tokens_event & event);

    // A routing event: expert_ids [n_tokens][n_expert_used] become slot ids in place. Waits for the matrices in
    // `wait_kinds`, of a layer that is staged (staging.h) for all. Of one that is streamed (streaming.h) they stay
    // expert ids. On failure the lane says why and the ids are safe to compute with.
    void acquire(Lane & lane, int il, int32_t * ids, int n_expert_used, int n_tokens, uint8_t wait_kinds,
                 const Routed & routed = {});

    // Whether matrices of the lane's layer are still on their way; no lock.
    bool pending(const Lane & lane, uint8_t kinds) const;
    void wait(Lane & lane, uint8_t kinds);

    // The pass ends: it failed, was cancelled, or what its layer waits for could not be read. Asked after every node
    // that is computed, by the thread that computes: no lock unless something failed.
    bool must_abort(Lane & lane) {
        if (!noted(lane)) {
            note_new_failures(lane);
        }
        return lane.failed || shared_.cancelled;
    }

    // Nothing to do or to report at this layer: every expert is in its own slot. No lock.
    bool idle(int il);
    // The ids are not known: choices count as distinct ones, as many as the layer has experts at most.
    void count_idle(Lane & lane, int il, int n_expert_used, int n_tokens);

    void watch(bool on) { watched_ = on; } // on: no layer is idle, so that activity is complete
    void resize(Tier & tier, int n_slots); // from the next routing event on; of the tier below at once
    // The same at once with memory of its own size, on any device; no pass is under way in any lane.
    void reallocate(Tier & tier, int n_slots);

  private:
    using Deadline = std::chrono::steady_clock::time_point;

    bool collect(Lane & lane, int il, const int32_t * ids, size_t n);
    bool fill_slots(Lane & lane, const Moment & now, const int32_t * ids, int n_expert_used, int n_tokens, Lock & lock);
    void write_slot_ids(const Lane & lane, int32_t * ids, int n_expert_used, size_t n, int first_slot) const;
    void count_pass(Lane & lane, int il, int n_tokens);
    void begin_pass(Lane & lane, int il, int n_tokens, Lock & lock);
    void note_ordered(Lane & lane, Lock & lock);
    bool pin_all(Lane & lane, const Moment & now, const int32_t * ids, int n_expert_used, int n_tokens, Lock & lock);
    void end_shortage(Lane & lane, uint64_t since_ns);
    void pin_present(Lane & lane, int il, int most);
    bool computes_with(const Tier & tier, int s) const;
    bool pin_absent(Lane & lane, const Moment & now, Lock & lock);
    void fail_without_slot(Lane & lane, int il, int expert);
    bool must_stream(const Lane & lane, int n_tokens, uint8_t wait_kinds) const;
    int slots_to_stream(const Lane & lane) const;
    bool stream_absent(Lane & lane, const Moment & now, Lock & lock);
    template <typename Take, typename Worth>
    int wait_for_slot(Take take, Worth worth, Lock & lock);
    bool wait_for_change(Deadline deadline, Lock & lock);
    void sweep_ahead(int il);
    void unpin(Lane & lane);
    // Nothing has failed since this lane's failures were last noted.
    bool noted(const Lane & lane) const {
        return lane.read_errors == get(shared_.counters.read_errors) && lane.given_up == shared_.given_up;
    }
    void note_new_failures(Lane & lane);
    void note_failures(Lane & lane);
    void apply_resize(Tier & tier);
    int n_usable() const;
    bool available(const Lane & lane, uint8_t kinds) const;
    bool settled(const Lane & lane, uint8_t kinds) const;
    uint8_t missing(const Lane & lane, int s, uint8_t kinds) const;
    void order(Lane & lane, uint8_t kinds);
    bool awaits_file(const Lane & lane, uint8_t kinds) const;
    void count_stall(Lane & lane, uint64_t since_ns);

    Store & store_;
    const Layout & layout_;
    Shared & shared_;
    Tiers & tiers_;
    Streaming & streaming_;
    Transfers & transfers_;
    PromptStaging & staging_;
    Forecaster & forecaster_;
    Missed & missed_;
    Events & events_;
    std::vector<Lane *> lanes_;
    int lane_ids_ = 0;
    bool short_of_slots_ = false; // a lane waits for slots: no other may take any
    std::atomic<bool> watched_{false};
    std::atomic<bool> computing_{false}; // a routing event has come: only another one ends the layer being computed
};

} // namespace moegguf
