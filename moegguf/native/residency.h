// residency.h: the bookkeeping of one tier: which expert is in which slot, and which expert is evicted next.
//
// A new expert gets a free slot, or else the slot of a victim. Each layer has one candidate (eviction_order.h). Among
// the candidates the policy's score decides, in a sweep the distance of the layer, then age. A layer with no more than
// its share of slots gives one only if no other layer can.
//
// Residency owns every slot, and it alone changes one: others call the functions below, mostly through the verbs of
// their tier (tier.h). It knows no memory, no file and no thread. It counts only for the slots of its tier.
#pragma once

#include "eviction_order.h"
#include "shared.h"

#include <atomic>

namespace moegguf {

constexpr int no_expert = -1;

struct Slot {
    int il = -1;             // -1: free
    int expert = -1;         // -1 with a layer: several experts pass through (streamed_supply.cpp)
    uint32_t generation = 0; // grows at every change of owner
    int pins = 0;            // layers that compute with the slot and slots that are filled from it; 0: may be evicted
    uint32_t requests = 0;   // routing events that needed this expert here
    uint8_t queued = 0;      // matrices that wait for their transfer, a bit per kind
    uint8_t reading = 0;     // matrices that are on their way, a bit per kind
    bool prefetched = false; // the expert came early and was not looked up since
    uint64_t last_use = 0;   // a tick of the tier

    bool streams() const { return il >= 0 && expert < 0; }
};

// Callers hold the store's lock, except for functions marked "any thread": a context reads the state of slots that it
// has pinned, which keep their owner meanwhile.
class Residency {
  public:
    Residency(const Layout & layout, const LayerSet & layers, const Numbering & numbering, TierCounters & counters);

    const Slot & slot(int s) const { return slots_[s]; }
    int n_slots() const { return (int)slots_.size(); }
    int n_usable() const { return n_usable_; }
    bool has_free() const { return numbering_.resident() || n_free_ > 0; }
    int find(int il, int expert) const { return slot_of_[layout_.key(il, expert)]; }

    // Returns the matrices of a slot that are there. Any thread: bytes written before publish() are seen after ready().
    uint8_t ready(int s) const { return state_[s].load(std::memory_order_acquire) & ready_bits; }
    bool failed(int s) const { return state_[s].load(std::memory_order_acquire) & failed_bit; }
    bool complete(int s) const { return ready(s) == layout_.layers[slots_[s].il].chunks; }
    bool all_ready() const { return n_absent_ == 0; } // any thread: every expert is there, in a slot of its own
    void publish(int s, uint8_t kinds);               // marks these matrices as there
    void fail(int s) { state_[s].fetch_or(failed_bit, std::memory_order_release); }
    void clear_failed(int s) { state_[s].fetch_and(uint8_t(~failed_bit), std::memory_order_relaxed); }

    // Returns a free slot or a victim for (il, expert); -1 when every slot is pinned or being read, or the victim is
    // worth no less than the expert.
    int choose(int il, int expert, const LayerStep & now, const Worth & worth);
    void assign(int s, int il, int expert); // gives away a free slot; no_expert: experts of the layer pass through it
    void end_stream(int s, int expert);     // gives the slot to the last expert that passed through it, which is whole
    void vacate(int s);

    void pin(int s, bool is_use = true); // is_use: the slot becomes the most recently used one
    void unpin(int s);
    void touch(int s);   // makes the slot the most recently used one
    bool request(int s); // notes that a routing event needs it. Returns true at the first look-up after a prefetch
    void mark_prefetched(int s);
    void queue(int s, uint8_t kinds) { slots_[s].queued |= kinds; }
    void drop(int s, uint8_t kinds) { slots_[s].queued &= ~kinds; } // removes these matrices from `queued`
    void begin_read(int s, uint8_t kinds);
    void end_read(int s, uint8_t kinds);

    const std::vector<uint32_t> & uses() const { return uses_; }   // [n_layer * n_expert_max] look-ups
    const std::vector<uint32_t> & loads() const { return loads_; } // [n_layer * n_expert_max] slots given
    void count_look_up(int il, int expert) { uses_[layout_.key(il, expert)] += 1; }

    // Exchanges the present policy with `policy`.
    void exchange_policy(std::unique_ptr<EvictionPolicy> & policy);
    void exchange_scores(std::vector<float> & scores); // empty: the policy decides
    void on_routing(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens);
    void on_routed(int il); // the router has chosen: the forecast of the layer ends
    // as_predicted: raw probabilities for policies that need them; NULL: equal to `probabilities`.
    void on_forecast(int il, const float * probabilities, const float * as_predicted = nullptr);
    bool ordered(const LayerStep & now) const { return policy().orders(now); }
    float score(int il, int expert, const LayerStep & now) const; // only while ordered() is true

    // Returns the chance that an expert is used when its layer comes next. This is the forecast; without a forecast it
    // is the share of the last tokens that used the expert. Works only while uses are counted.
    float chance(int il, int expert) const;
    void count_uses(bool on);

    void set_usable(int n);

    // Verifies the facts that the bookkeeping has twice: free + owned = usable, pins >= 0, the map of experts agrees
    // with the slots. Verifies the gauges and the order of eviction, too. Throws Error(BROKEN) with the rule and the
    // values.
    void check() const;

  private:
    static constexpr uint8_t ready_bits = (1 << MOEGGUF_MAX_KINDS) - 1, failed_bit = 1 << 7;

    EvictionPolicy & policy() const { return scores_.set() ? (EvictionPolicy &)scores_ : *policy_; }
    int lowest_free();
    int victim(const LayerStep & now);
    void own(int s, int expert);
    void check_slot(int s) const;
    std::string describe(int s) const;
    bool evictable(int s) const;
    void update_order(int s); // puts a slot into the order of eviction if it is evictable, or takes it out
    void set_floors();

    const Layout & layout_;
    const LayerSet & set_;
    const Numbering & numbering_;
    TierCounters & counters_;
    std::vector<Slot> slots_;
    std::vector<std::atomic<uint8_t>> state_; // [n_slots] a bit per matrix that is there, and failed_bit
    std::vector<int> slot_of_;                // [n_layer * n_expert_max]
    std::vector<int> count_;                  // [n_layer] slots held
    std::vector<int> floor_;                  // [n_layer] slots that other layers may not take
    std::vector<uint32_t> uses_;
    std::vector<uint32_t> loads_;
    EvictionOrder order_;
    std::unique_ptr<EvictionPolicy> policy_;
    mutable ScoreTable scores_;
    std::unique_ptr<FadingAverage> average_use_; // nullptr while uses are not counted
    std::vector<float> forecast_;                // [n_layer * n_expert_max], valid for layers in forecast_known_
    std::vector<uint8_t> forecast_known_;        // [n_layer]
    uint64_t tick_ = 0;
    std::atomic<int> n_absent_; // matrices of all experts that are not there
    int n_usable_;
    int n_free_;         // free slots among the usable ones
    int first_free_ = 0; // no slot before this one is free
};

} // namespace moegguf
