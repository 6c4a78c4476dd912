// residency.h: who sits in which slot, and who goes next. Bookkeeping only: no threads, no I/O, no locks.
#pragma once

#include "rates.h"

namespace moegguf {

struct Slot {
    int il = -1; // -1: free
    int expert = -1;
    uint32_t generation = 0; // bumped at every change of owner
    int pins = 0;
    uint32_t claims = 0; // times a gate has asked for this expert here
    uint8_t ready = 0;   // a bit per matrix kind
    uint8_t queued = 0;
    uint8_t reading = 0;
    bool failed = false;
    bool prefetched = false; // came early and was not looked up since
    uint64_t last_use = 0;
};

// What a layer being computed means for the order of eviction.
struct Moment {
    int il;     // the layer computing now
    bool sweep; // a prompt's pass, which touches nearly all experts of every layer in order
    bool token; // a pass of one token
};

class Residency {
  public:
    explicit Residency(const Layout & layout);

    Slot & slot(int s) { return slots_[s]; }
    const Slot & slot(int s) const { return slots_[s]; }
    int n_slots() const { return (int)slots_.size(); }
    int n_used() const { return n_used_; }
    int n_usable() const { return n_usable_; }
    bool resident() const { return resident_; }

    int find(int il, int expert) const { return slot_of_[layout_.key(il, expert)]; }

    // A free slot or a victim for (il, expert), or -1 when every slot is pinned or being read.
    // min_worth: only take a victim that is worth less than this.
    int choose(int il, int expert, Moment now, float min_worth) const;
    void assign(int s, int il, int expert);
    void vacate(int s);
    void touch(int s) { slots_[s].last_use = ++tick_; }
    void count_look_up(int il, int expert) { uses_[layout_.key(il, expert)] += 1; }
    const std::vector<uint32_t> & uses() const { return uses_; }   // [n_layer * n_expert_max] look-ups
    const std::vector<uint32_t> & loads() const { return loads_; } // [n_layer * n_expert_max] slots given

    void set_scores(const float * scores, size_t n);
    void set_rates(const moegguf_rates * rates) { rates_.set(rates); }
    void count_use(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens);

    // What decides before recency: the score table, or without one, and while tokens come one by one, the rates.
    bool judged(Moment now) const { return !scores_.empty() || (now.token && rates_.on()); }
    float worth(int il, int expert, Moment now) const; // 0 where nothing is judged

    void share_all_slots() { resident_ = false; } // leave the resident numbering
    void set_usable(int n);

  private:
    struct Rank;
    Rank rank(const Slot & slot, Moment now) const;
    bool takeable(const Slot & slot) const;
    bool above_floor(const Slot & slot) const { return count_[slot.il] > floor_[slot.il]; }
    int lowest(Moment now, bool respect_floors) const;
    void set_floors();

    const Layout & layout_;
    std::vector<Slot> slots_;
    std::vector<int> slot_of_; // [n_layer * n_expert_max]
    std::vector<int> count_;   // [n_layer] slots held
    std::vector<int> floor_;   // [n_layer] slots that other layers may not take
    std::vector<uint32_t> uses_;
    std::vector<uint32_t> loads_;
    std::vector<float> scores_;
    Rates rates_;
    uint64_t tick_ = 0;
    int n_used_ = 0;
    int n_usable_ = 0;
    bool resident_;
};

} // namespace moegguf
