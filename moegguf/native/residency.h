// residency.h: the bookkeeping of one tier: which expert is in which slot, and which expert is evicted next.
//
// In a resident tier, each expert has its own slot. In any other tier, a new expert gets a free slot or, if there is
// none, the slot of a victim. It gets no slot if there is no victim. A prefetched expert also gets none unless the
// victim is worth less (struct Worth in policies/policy.h).
//
// Each layer has at most one candidate for eviction (eviction_order.h). A slot that is pinned, or into which a transfer
// is under way, is not a candidate. A slot whose transfers are only queued can be a candidate. The victim is the
// candidate with the lowest policy score. If scores are equal, it is the least recently used expert. In a sweep, it is
// the expert of the layer that is needed last. A sweep means that several tokens use nearly all experts (LayerStep in
// policies/policy.h).
//
// Each layer has a floor, which is a number of slots. A layer with no more slots than its floor loses one only if no
// layer above its own floor has a candidate. Floors are above 0 only while the tier has fewer slots than one token uses
// in all of the tier's layers (set_floors()).
//
// Only class Residency changes slots. Class Tier calls the functions below to assign, pin, unpin and vacate slots
// (tier.h). Class Link calls them to record the state of transfers (link.h). The streamed supply calls end_stream()
// when a stream has ended. Supplies and the transfer queue also record requests, prefetches and dropped transfers.
// Residency knows nothing about memory, files or threads, and its counters cover only its own tier.
#pragma once

#include "eviction_order.h"
#include "shared.h"

#include <atomic>

namespace moegguf {

constexpr int no_expert = -1;

struct Slot {
    int il = -1;     // layer that owns the slot; -1: the slot is free
    int expert = -1; // expert in the slot; -1 with a layer: experts are streamed through the slot (streamed_supply.cpp)
    uint32_t generation = 0; // increases whenever the slot is assigned or vacated
    // Number of layers that use the slot, plus number of slots that are filled from it; 0: may be evicted, unless a
    // transfer into it is under way.
    int pins = 0;
    uint32_t requests = 0;   // number of calls to request() for this slot
    uint8_t queued = 0;      // bits of the slot's matrices whose transfer is queued
    uint8_t reading = 0;     // bits of the slot's matrices whose transfer is under way
    bool prefetched = false; // true: the expert was prefetched and has not been requested since
    uint64_t last_use = 0;   // value of the tier's counter of uses at the slot's last use

    bool streams() const { return il >= 0 && expert < 0; }
};

// The slots of one tier. Callers hold the store's lock, except for functions marked "any thread". Without the lock, a
// thread reads only the state of slots that it has pinned, because pinned slots keep their expert.
class Residency {
  public:
    Residency(const Layout & layout, const LayerSet & layers, const Numbering & numbering, TierCounters & counters);

    const Slot & slot(int s) const { return slots_[s]; }
    int n_slots() const { return (int)slots_.size(); }
    int n_usable() const { return n_usable_; }
    bool has_free() const { return numbering_.resident() || n_free_ > 0; }
    int find(int il, int expert) const { return slot_of_[layout_.key(il, expert)]; }

    // Returns the bits of the matrices that are complete in a slot. Any thread may call this: if a bit is set, the
    // thread also sees the bytes that were written before publish().
    uint8_t ready(int s) const { return state_[s].load(std::memory_order_acquire) & ready_bits; }
    bool failed(int s) const { return state_[s].load(std::memory_order_acquire) & failed_bit; }
    bool complete(int s) const { return ready(s) == layout_.layers[slots_[s].il].chunks; }
    // True: every expert of the tier is complete in a slot. Any thread may call this.
    bool all_ready() const { return n_absent_ == 0; }
    void publish(int s, uint8_t kinds); // marks these matrices of the slot as complete
    void fail(int s) { state_[s].fetch_or(failed_bit, std::memory_order_release); }
    void clear_failed(int s) { state_[s].fetch_and(uint8_t(~failed_bit), std::memory_order_relaxed); }

    // Chooses a slot for expert (il, expert): the expert's own slot in a resident tier, otherwise a free slot or the
    // slot of a victim. Returns -1 if each such slot is pinned or being filled, or if the victim is worth at least as
    // much as the expert.
    int choose(int il, int expert, const LayerStep & now, const Worth & worth);
    void assign(int s, int il, int expert); // assigns a free slot to an expert, or to a layer's stream (no_expert)
    void end_stream(int s, int expert);     // records that a streaming slot now holds this whole expert
    void vacate(int s);

    // Adds a pin. If is_use, the slot also becomes the most recently used one, and the policy counts a use.
    void pin(int s, bool is_use = true);
    void unpin(int s);
    void touch(int s); // makes the slot the most recently used one
    // Counts a request for the slot's expert, by a routing event or for a copy from the slot. Returns true if the
    // expert was prefetched and this is its first request.
    bool request(int s);
    void mark_prefetched(int s);
    void queue(int s, uint8_t kinds) { slots_[s].queued |= kinds; }
    void drop(int s, uint8_t kinds) { slots_[s].queued &= ~kinds; } // removes these matrices from `queued`
    void begin_read(int s, uint8_t kinds);
    void end_read(int s, uint8_t kinds);

    // [n_layer * n_expert_max] number of look-ups of each expert.
    const std::vector<uint32_t> & uses() const { return uses_; }
    // [n_layer * n_expert_max] number of times that each expert got a slot.
    const std::vector<uint32_t> & loads() const { return loads_; }
    void count_look_up(int il, int expert) { uses_[layout_.key(il, expert)] += 1; }

    // Exchanges the current policy with `policy`.
    void exchange_policy(std::unique_ptr<EvictionPolicy> & policy);
    // Exchanges the table of scores; an empty table: the policy decides.
    void exchange_scores(std::vector<float> & scores);
    void on_routing(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens);
    void on_routed(int il); // drops the forecast of layer il, because its router has chosen, and informs the policy
    // Stores the forecast for layer il; NULL: there is none. `as_predicted`: raw probabilities, for policies that need
    // them; NULL: equal to `probabilities`.
    void on_forecast(int il, const float * probabilities, const float * as_predicted = nullptr);
    bool ordered(const LayerStep & now) const { return policy().orders(now); }
    float score(int il, int expert, const LayerStep & now) const; // valid only if ordered() returns true

    // Returns the chance that an expert will be used the next time its layer is computed. This is the forecast; without
    // a forecast it is the share of recent tokens that used the expert, or 0 if uses are not counted (count_uses).
    float chance(int il, int expert) const;
    void count_uses(bool on);

    void set_usable(int n);

    // Verifies that the bookkeeping is consistent: the free and owned slots add up to the usable ones, no slot has
    // negative pins, and the map of experts matches the slots. Also verifies the gauges, the number of absent matrices,
    // and the eviction order. Throws Error(BROKEN) with the broken rule and the values.
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
    void update_order(int s); // adds slot s to the eviction order if it may be evicted; otherwise removes it
    void set_floors();

    const Layout & layout_;
    const LayerSet & set_;
    const Numbering & numbering_;
    TierCounters & counters_;
    std::vector<Slot> slots_;
    // [n_slots] bits of the matrices that are complete in each slot, and failed_bit.
    std::vector<std::atomic<uint8_t>> state_;
    std::vector<int> slot_of_; // [n_layer * n_expert_max] slot of each expert; -1: none
    std::vector<int> count_;   // [n_layer] number of slots that hold an expert of the layer
    // [n_layer] number of slots that the layer keeps while another layer has more than its own floor.
    std::vector<int> floor_;
    std::vector<uint32_t> uses_;
    std::vector<uint32_t> loads_;
    EvictionOrder order_;
    std::unique_ptr<EvictionPolicy> policy_;
    mutable ScoreTable scores_;
    std::unique_ptr<FadingAverage> average_use_; // fading average of each expert's use; nullptr: none
    std::vector<float> forecast_; // [n_layer * n_expert_max] forecast probabilities, valid where forecast_known_ is 1
    std::vector<uint8_t> forecast_known_; // [n_layer] 1: the layer has a forecast
    uint64_t tick_ = 0;
    std::atomic<int> n_absent_; // number of the tier's expert matrices that are not complete in a slot
    int n_usable_;
    int n_free_;         // number of free slots among the usable ones
    int first_free_ = 0; // no slot before this one is free
};

} // namespace moegguf
