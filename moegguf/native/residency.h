// residency.h: which expert is in which slot, and which one is evicted next.
//
// A slot is absent, then given to an expert (assign) whose matrices are queued, read and ready, each on its own; it is
// pinned while layers compute with it or another slot is filled from it, and absent again when it is vacated. Every
// change of owner bumps its generation. Residency owns every slot and alone changes one: others call its verbs.
// Bookkeeping only: it knows no memory, no file, no thread and no counter but those of its tier's slots.
#pragma once

#include "policies/policy.h"
#include "shared.h"

#include <algorithm>
#include <atomic>

namespace moegguf {

struct Slot {
    int il = -1;             // -1: free
    int expert = -1;         // -1 with a layer: several pass through (streamed_supply.cpp)
    uint32_t generation = 0; // bumped at every change of owner
    int pins = 0;
    uint32_t requests = 0; // routing events that asked for this expert here
    uint8_t queued = 0;    // a bit per matrix kind
    uint8_t reading = 0;
    bool prefetched = false; // came early and was not looked up since
    uint64_t last_use = 0;

    bool streams() const { return il >= 0 && expert < 0; }
};

// The experts that may be evicted, by layer, and which of a layer is the first to go: the least recently used of those
// with the lowest score. A slot is in here while its expert may be evicted. The first is found in one pass over them
// when it is asked for, and is known until it is taken or scores of the layer change.
class EvictionOrder {
  public:
    struct Entry {
        float score; // holds while the layer is scored
        uint64_t last_use;
        int slot;
        int expert;

        bool before(const Entry & other) const { // without a branch, as it is asked of whole layers
            return (score < other.score) | ((score == other.score) & (last_use < other.last_use));
        }
    };

    EvictionOrder(const Layout & layout, int n_slots) : at_(n_slots, -1), layers_(layout.layers.size()) {
        for (size_t il = 0; il < layers_.size(); il++) {
            layers_[il].entries.reserve(std::min(n_slots, layout.layers[il].n_expert)); // never allocates later
        }
    }

    void follow(const EvictionPolicy * policy) { // whose scores decide from now on; nullptr: recency alone
        if (policy == policy_) { return; }
        policy_ = policy;
        for (LayerOrder & layer : layers_) { layer.is_scored = false; }
    }
    void scores_changed(int il) { layers_[il].is_scored = false; }

    bool contains(int s) const { return at_[s] >= 0; }
    void insert(int s, int il, int expert, uint64_t last_use) {
        LayerOrder & layer = layers_[il];
        at_[s] = (int)layer.entries.size();
        layer.entries.push_back({layer.is_scored ? score(il, expert) : 0.0f, last_use, s, expert});
        if (layer.first >= 0 && layer.entries.back().before(layer.entries[layer.first])) { layer.first = at_[s]; }
    }
    void remove(int s, int il) {
        LayerOrder & layer = layers_[il];
        const int at = at_[s], end = (int)layer.entries.size() - 1; // the last entry takes its place
        layer.first = layer.first == at ? -1 : layer.first == end ? at : layer.first;
        layer.entries[at] = layer.entries[end];
        at_[layer.entries[at].slot] = at;
        layer.entries.pop_back();
        at_[s] = -1;
    }

    const Entry * first(int il) { // nullptr: the layer has none
        LayerOrder & layer = layers_[il];
        std::vector<Entry> & entries = layer.entries;
        if (entries.empty()) { return nullptr; }
        if (!layer.is_scored) {
            for (Entry & entry : entries) { entry.score = score(il, entry.expert); }
            layer.is_scored = true;
            layer.first = -1;
        }
        if (layer.first < 0) {
            const auto before = [](const Entry & a, const Entry & b) { return a.before(b); };
            layer.first = int(std::min_element(entries.begin(), entries.end(), before) - entries.begin());
        }
        return &entries[layer.first];
    }

  private:
    struct LayerOrder {
        std::vector<Entry> entries;
        bool is_scored = false;
        int first = -1; // of a scored layer, the entry that goes first; -1: not known
    };

    float score(int il, int expert) const { return policy_ ? policy_->score(il, expert) : 0.0f; }

    const EvictionPolicy * policy_ = nullptr;
    std::vector<int> at_;            // [n_slots], where in its layer's entries; -1: not in here
    std::vector<LayerOrder> layers_; // [n_layer]
};

// Everything here belongs to the store's lock, except what says "any thread": a context reads the state of slots that
// it has pinned, which keep their owner meanwhile.
class Residency {
  public:
    Residency(const Layout & layout, const LayerSet & layers, const Numbering & numbering, TierCounters & counters);

    const Slot & slot(int s) const { return slots_[s]; }
    int n_slots() const { return (int)slots_.size(); }
    int n_usable() const { return n_usable_; }
    bool has_free() const { return numbering_.resident() || n_free_ > 0; }
    int find(int il, int expert) const { return slot_of_[layout_.key(il, expert)]; }

    // Which matrices of a slot are there. Any thread: bytes written before publish() are seen after ready().
    uint8_t ready(int s) const { return state_[s].load(std::memory_order_acquire) & ready_bits; }
    bool failed(int s) const { return state_[s].load(std::memory_order_acquire) & failed_bit; }
    bool complete(int s) const { return ready(s) == layout_.layers[slots_[s].il].chunks; }
    void publish(int s, uint8_t kinds) { state_[s].fetch_or(kinds, std::memory_order_release); }
    void fail(int s) { state_[s].fetch_or(failed_bit, std::memory_order_release); }
    void forgive(int s) { state_[s].fetch_and(uint8_t(~failed_bit), std::memory_order_relaxed); } // it is read again

    // A free slot or a victim for (il, expert), or -1 when every slot is pinned or being read, or the victim is worth
    // no less than it.
    int choose(int il, int expert, const LayerStep & now, const Worth & worth);
    void assign(int s, int il, int expert);
    void vacate(int s);
    void reserve(int s, int il);  // a free slot, for experts that are streamed
    void keep(int s, int expert); // in such a slot the expert that is there, whole

    void pin(int s);  // by a look-up or for a miss: the most recent use
    void hold(int s); // as a pin, without a use
    void unpin(int s);
    void touch(int s);   // as recent as if it was used now, without a use
    bool request(int s); // by a routing event; whether it came early and nobody has asked for it since
    void mark_prefetched(int s);
    void queue(int s, uint8_t kinds) { slots_[s].queued |= kinds; }
    void drop(int s, uint8_t kinds) { slots_[s].queued &= ~kinds; } // queued no longer
    void begin_read(int s, uint8_t kinds);
    void end_read(int s, uint8_t kinds);

    const std::vector<uint32_t> & uses() const { return uses_; }   // [n_layer * n_expert_max] look-ups
    const std::vector<uint32_t> & loads() const { return loads_; } // [n_layer * n_expert_max] slots given
    void count_look_up(int il, int expert) { uses_[layout_.key(il, expert)] += 1; }

    // `policy` gets the one in force before.
    void exchange_policy(std::unique_ptr<EvictionPolicy> & policy);
    void exchange_scores(std::vector<float> & scores); // empty: the policy decides
    void on_routing(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens);
    void on_routed(int il); // the router has chosen: what was predicted of the layer is over
    // as_predicted: for policies that take it so; NULL: the same.
    void on_forecast(int il, const float * probabilities, const float * as_predicted = nullptr);
    bool ordered(const LayerStep & now) const { return policy().orders(now); }
    float score(int il, int expert, const LayerStep & now) const; // where ordered

    // The chance of an expert to be used when its layer comes next: as predicted, else the share of the last tokens
    // that used it. Known while uses are counted.
    float chance(int il, int expert) const;
    void count_uses(bool on);

    void set_usable(int n);

  private:
    static constexpr uint8_t ready_bits = (1 << MOEGGUF_MAX_KINDS) - 1, failed_bit = 1 << 7;

    EvictionPolicy & policy() const { return scores_.set() ? (EvictionPolicy &)scores_ : *policy_; }
    int lowest_free();
    int victim(const LayerStep & now);
    void own(int s, int expert);
    bool evictable(int s) const;
    void update_order(int s); // in or out of the order of eviction, as its slot is evictable or not
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
    std::unique_ptr<FadingAverage> average_use_; // while uses are counted
    std::vector<float> forecast_;                // [n_layer * n_expert_max], where known
    std::vector<uint8_t> forecast_known_;        // [n_layer]
    uint64_t tick_ = 0;
    int n_usable_;
    int n_free_;         // of those usable
    int first_free_ = 0; // none before it is free
};

} // namespace moegguf
