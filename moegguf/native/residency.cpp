#include "residency.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moegguf {

// The smallest rank goes first: worth, then distance of the next use, then age.
struct Residency::Rank {
    float worth;
    int nearness;
    uint64_t last_use;

    bool operator<(const Rank & other) const {
        if (worth != other.worth) {
            return worth < other.worth;
        }
        return nearness != other.nearness ? nearness < other.nearness : last_use < other.last_use;
    }
};

Residency::Residency(const Layout & layout)
    : layout_(layout),
      slots_(layout.n_slots),
      slot_of_(layout.layers.size() * layout.n_expert_max, -1),
      count_(layout.layers.size(), 0),
      floor_(layout.layers.size(), 0),
      uses_(slot_of_.size(), 0),
      loads_(slot_of_.size(), 0),
      rates_(layout),
      n_usable_(layout.n_slots),
      resident_(layout.resident) {
    set_floors();
}

// With fewer slots than one token touches, a global LRU always evicts what the next layers need and hits nothing.
// Each layer then keeps an equal share, and what one layer needs at once is left to circulate.
void Residency::set_floors() {
    std::fill(floor_.begin(), floor_.end(), 0);
    if (n_usable_ >= layout_.token_cycle) {
        return;
    }
    int widest = 0;
    for (const Layer & layer : layout_.layers) {
        widest = std::max(widest, layer.n_expert_used);
    }
    int to_share = std::max(0, n_usable_ - widest);
    int layers = layout_.n_moe_layers;
    for (size_t il = 0; il < floor_.size(); il++) {
        if (layout_.layers[il].n_expert > 0) {
            floor_[il] = to_share / layers; // earlier layers get the smaller share, the rest goes to later ones
            to_share -= floor_[il];
            layers -= 1;
        }
    }
}

bool Residency::takeable(const Slot & slot) const {
    return slot.pins == 0 && slot.reading == 0;
}

// In a sweep every layer will be needed again in order, so the layer that was just computed is needed last.
Residency::Rank Residency::rank(const Slot & slot, Moment now) const {
    const int n_layer = (int)layout_.layers.size();
    const int distance = (slot.il - now.il + n_layer) % n_layer;
    return {worth(slot.il, slot.expert, now), now.sweep ? -(distance == 0 ? n_layer : distance) : 0, slot.last_use};
}

int Residency::lowest(Moment now, bool respect_floors) const {
    int best = -1;
    Rank best_rank{};
    for (int s = 0; s < n_usable_; s++) {
        const Slot & slot = slots_[s];
        if (!takeable(slot)) {
            continue;
        }
        if (slot.il < 0) {
            return s;
        }
        if (respect_floors && !above_floor(slot)) {
            continue;
        }
        const Rank r = rank(slot, now);
        if (best < 0 || r < best_rank) {
            best = s;
            best_rank = r;
        }
    }
    return best;
}

int Residency::choose(int il, int expert, Moment now, float min_worth) const {
    if (resident_) {
        const int s = layout_.layers[il].first_slot + expert;
        return takeable(slots_[s]) ? s : -1;
    }
    int s = lowest(now, true);
    if (s < 0) {
        s = lowest(now, false);
    }
    const bool worth_it = s < 0 || slots_[s].il < 0 || worth(slots_[s].il, slots_[s].expert, now) < min_worth;
    return worth_it ? s : -1;
}

void Residency::assign(int s, int il, int expert) {
    Slot & slot = slots_[s];
    slot.generation += 1;
    slot.il = il;
    slot.expert = expert;
    slot.ready = 0;
    slot.queued = 0;
    slot.failed = false;
    slot.prefetched = false;
    slot_of_[layout_.key(il, expert)] = s;
    loads_[layout_.key(il, expert)] += 1;
    count_[il] += 1;
    n_used_ += 1;
    touch(s);
}

void Residency::vacate(int s) {
    Slot & slot = slots_[s];
    if (slot.il < 0) {
        return;
    }
    slot_of_[layout_.key(slot.il, slot.expert)] = -1;
    count_[slot.il] -= 1;
    n_used_ -= 1;
    slot.generation += 1;
    slot.il = -1;
    slot.expert = -1;
    slot.ready = 0;
    slot.queued = 0;
    slot.prefetched = false;
}

void Residency::set_scores(const float * scores, size_t n) {
    scores_.assign(scores, scores + n);
    for (float & score : scores_) {
        if (!std::isfinite(score)) {
            score = 0.0f;
        }
    }
}

float Residency::worth(int il, int expert, Moment now) const {
    if (!scores_.empty()) {
        return scores_[layout_.key(il, expert)];
    }
    return now.token && rates_.on() ? rates_.worth(il, expert, now.il) : 0.0f;
}

// With a slot for every expert there is nothing to decide, and idle gates do not even look: averages start when the
// pool shrinks.
void Residency::count_use(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) {
    if (rates_.on() && !resident_) {
        rates_.count(il, expert_ids, n_expert_used, n_tokens);
    }
}

void Residency::set_usable(int n) {
    n_usable_ = n;
    set_floors();
}

} // namespace moegguf
