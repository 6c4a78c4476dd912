// residency.cpp: implements residency.h: slot changes, the choice of a victim, and the verification of the bookkeeping.
#include "residency.h"

#include <algorithm>
#include <utility>

namespace moegguf {
namespace {

constexpr float use_half_life_tokens = 64.0f;

struct Rank { // the rank of a candidate; the candidate with the lowest rank is evicted first
    float score;
    int turn;
    uint64_t last_use;

    bool before(const Rank & other) const {
        if (score != other.score) { return score < other.score; }
        return turn != other.turn ? turn < other.turn : last_use < other.last_use;
    }
};

template <typename Describe>
void require(bool holds, const char * rule, Describe describe) {
    if (!holds) { throw Error(MOEGGUF_BROKEN, std::string("the rule '") + rule + "' is broken: " + describe()); }
}

} // namespace

Residency::Residency(const Layout & layout, const LayerSet & layers, const Numbering & numbering,
                     TierCounters & counters)
    : layout_(layout),
      set_(layers),
      numbering_(numbering),
      counters_(counters),
      slots_(numbering.n_slots()),
      state_(numbering.n_slots()),
      slot_of_(layout.n_keys(), -1),
      count_(layout.layers.size(), 0),
      floor_(layout.layers.size(), 0),
      uses_(layout.n_keys(), 0),
      loads_(layout.n_keys(), 0),
      order_(layout, numbering.n_slots()),
      policy_(make_policy(layout, "lru")),
      scores_(layout),
      forecast_(layout.n_keys(), 0.0f),
      forecast_known_(layout.layers.size(), 0),
      n_absent_(layers.n_chunks),
      n_usable_(numbering.n_slots()),
      n_free_(numbering.n_slots()) {
    set_floors();
}

// Sets floor_, the number of slots that each layer keeps while another layer has more slots than its own floor. The
// floors are 0 if all experts of one token fit into the slots. If they do not fit, a global LRU would always evict the
// experts of the next layers, and never have a cache hit. In that case, the number of slots that one layer needs at
// once stays available to all layers, and the layers share the remaining slots equally.
void Residency::set_floors() {
    std::fill(floor_.begin(), floor_.end(), 0);
    if (n_usable_ >= set_.token_cycle) { return; }
    int to_share = std::max(0, n_usable_ - set_.n_used_max);
    int layers = (int)set_.moe_layers.size();
    for (int il : set_.moe_layers) {
        floor_[il] = to_share / layers; // rounded down: later layers share the remainder
        to_share -= floor_[il];
        layers -= 1;
    }
}

bool Residency::evictable(int s) const {
    const Slot & slot = slots_[s];
    return slot.expert >= 0 && slot.pins == 0 && slot.reading == 0 && s < n_usable_;
}

void Residency::update_order(int s) {
    const Slot & slot = slots_[s];
    if (order_.contains(s) && !evictable(s)) { order_.remove(s, slot.il); }
    if (!order_.contains(s) && evictable(s)) { order_.insert(s, slot.il, slot.expert, slot.last_use); }
}

// Returns the slot whose expert is evicted next; -1: none. Each layer has one candidate. The candidate with the lowest
// rank is evicted: ranks compare the score, then in a sweep the distance of the layer's next use, then the age. A layer
// at its floor loses a slot only if no layer above its floor has a candidate.
//
// In a sweep, every layer is needed again in order, so the layer that was just computed is needed last.
int Residency::victim(const LayerStep & now) {
    const int n_layer = (int)layout_.layers.size();
    EvictionPolicy & policy = this->policy();
    const bool ordered = policy.orders(now);
    order_.follow(ordered ? &policy : nullptr);
    // slot of the best victim: [0] in a layer at or below its floor, [1] in a layer above its floor
    int best[2] = {-1, -1};
    Rank best_rank[2] = {};
    for (int il : set_.moe_layers) {
        const EvictionOrder::Entry * first = order_.first(il);
        if (!first) { continue; }
        Rank rank = {first->score, 0, first->last_use};
        if (ordered) { rank.score += policy.layer_offset(il, now); }
        if (now.sweep) {
            const int distance = (il - now.il + n_layer) % n_layer;
            rank.turn = -(distance == 0 ? n_layer : distance);
        }
        const bool above_floor = count_[il] > floor_[il];
        if (best[above_floor] < 0 || rank.before(best_rank[above_floor])) {
            best[above_floor] = first->slot;
            best_rank[above_floor] = rank;
        }
    }
    return best[1] >= 0 ? best[1] : best[0];
}

int Residency::choose(int il, int expert, const LayerStep & now, const Worth & worth) {
    if (numbering_.resident()) {
        const int s = numbering_.own_slot(il, expert);
        return slots_[s].pins == 0 && slots_[s].reading == 0 ? s : -1;
    }
    if (n_free_ > 0) { return lowest_free(); }
    const int s = victim(now);
    if (s < 0) { return -1; }
    const Slot & slot = slots_[s];
    const bool cheap = !ordered(now) || score(slot.il, slot.expert, now) < worth.score;
    return cheap && chance(slot.il, slot.expert) < worth.chance ? s : -1;
}

int Residency::lowest_free() {
    while (slots_[first_free_].il >= 0) { first_free_ += 1; }
    return first_free_;
}

// Assigns a free slot to an expert of layer il, or to the stream of the layer (no_expert).
void Residency::assign(int s, int il, int expert) {
    Slot & slot = slots_[s];
    slot.generation += 1;
    slot.il = il;
    count(counters_.slots_used);
    n_free_ -= s < n_usable_;
    if (expert != no_expert) { own(s, expert); }
    update_order(s);
}

void Residency::own(int s, int expert) {
    Slot & slot = slots_[s];
    slot.expert = expert;
    slot.last_use = ++tick_;
    slot_of_[layout_.key(slot.il, expert)] = s;
    loads_[layout_.key(slot.il, expert)] += 1;
    count_[slot.il] += 1;
    policy_->on_load(slot.il, expert);
}

void Residency::vacate(int s) {
    Slot & slot = slots_[s];
    if (slot.il < 0) { return; }
    if (order_.contains(s)) { order_.remove(s, slot.il); }
    if (!slot.streams()) {
        policy_->on_evict(slot.il, slot.expert);
        slot_of_[layout_.key(slot.il, slot.expert)] = -1;
        count_[slot.il] -= 1;
    }
    uncount(counters_.slots_used);
    n_absent_ += __builtin_popcount(ready(s));
    n_free_ += s < n_usable_;
    first_free_ = std::min(first_free_, s);
    slot.generation += 1;
    slot.il = -1;
    slot.expert = -1;
    slot.queued = 0;
    slot.prefetched = false;
    state_[s].store(0, std::memory_order_relaxed);
}

void Residency::end_stream(int s, int expert) {
    own(s, expert);
    // Counts one use of the streamed expert, because the pass has multiplied by it.
    policy_->on_use(slots_[s].il, expert);
    publish(s, layout_.layers[slots_[s].il].chunks);
}

void Residency::publish(int s, uint8_t kinds) {
    state_[s].fetch_or(kinds, std::memory_order_release);
    n_absent_ -= __builtin_popcount(kinds);
}

bool Residency::request(int s) {
    Slot & slot = slots_[s];
    slot.requests += 1;
    return std::exchange(slot.prefetched, false);
}

void Residency::mark_prefetched(int s) {
    slots_[s].prefetched = true;
    policy_->on_prefetch(slots_[s].il, slots_[s].expert);
}

void Residency::pin(int s, bool is_use) {
    Slot & slot = slots_[s];
    slot.pins += 1;
    if (slot.pins == 1) {
        count(counters_.slots_pinned);
        update_order(s);
    }
    if (!is_use) { return; }
    slot.last_use = ++tick_;
    if (!slot.streams()) { policy_->on_use(slot.il, slot.expert); }
}

void Residency::unpin(int s) {
    Slot & slot = slots_[s];
    slot.pins -= 1;
    if (slot.pins == 0) {
        uncount(counters_.slots_pinned);
        update_order(s);
    }
}

void Residency::touch(int s) {
    slots_[s].last_use = ++tick_;
    if (order_.contains(s)) {
        order_.remove(s, slots_[s].il);
        update_order(s);
    }
}

void Residency::begin_read(int s, uint8_t kinds) {
    slots_[s].queued &= ~kinds;
    slots_[s].reading |= kinds;
    update_order(s);
}

void Residency::end_read(int s, uint8_t kinds) {
    slots_[s].reading &= ~kinds;
    update_order(s);
}

void Residency::exchange_policy(std::unique_ptr<EvictionPolicy> & policy) {
    for (const Slot & slot : slots_) {
        if (slot.expert >= 0) {
            policy->on_load(slot.il, slot.expert); // reports to the new policy the experts that are already in slots
        }
    }
    policy_.swap(policy);
    // order_ compares addresses of policies, and a later policy may have the same address as an earlier one.
    order_.follow(nullptr);
}

void Residency::exchange_scores(std::vector<float> & scores) {
    scores_.exchange(scores, [this](int il) { order_.scores_changed(il); });
    if (!scores_.set()) { order_.follow(nullptr); }
}

// Counts the uses of a routing event if count_uses() is on, and passes the event to the policy. While the tier is
// resident, nothing is evicted, and the policy gets no routing events. So the policy starts to learn only when the pool
// shrinks.
void Residency::on_routing(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) {
    if (average_use_) { average_use_->count(il, expert_ids, n_expert_used, n_tokens); }
    if (!numbering_.resident() && policy_->on_routing(il, expert_ids, n_expert_used, n_tokens) && !scores_.set()) {
        order_.scores_changed(il);
    }
}

void Residency::on_routed(int il) {
    on_forecast(il, nullptr);
    if (!numbering_.resident() && policy_->on_routed(il) && !scores_.set()) { order_.scores_changed(il); }
}

void Residency::on_forecast(int il, const float * probabilities, const float * as_predicted) {
    forecast_known_[il] = probabilities != nullptr;
    if (probabilities) {
        float * row = &forecast_[layout_.key(il, 0)];
        std::transform(probabilities, probabilities + layout_.layers[il].n_expert, row, probability);
        probabilities = row;
    }
    const float * for_policy = as_predicted && policy_->takes_as_predicted() ? as_predicted : probabilities;
    if (!numbering_.resident() && policy_->on_forecast(il, for_policy) && !scores_.set()) { order_.scores_changed(il); }
}

float Residency::chance(int il, int expert) const {
    if (forecast_known_[il]) { return forecast_[layout_.key(il, expert)]; }
    return average_use_ ? average_use_->row(il)[expert] : 0.0f;
}

void Residency::count_uses(bool on) {
    average_use_ = on ? std::make_unique<FadingAverage>(layout_, use_half_life_tokens) : nullptr;
}

float Residency::score(int il, int expert, const LayerStep & now) const {
    return policy().score(il, expert) + policy().layer_offset(il, now);
}

void Residency::check() const {
    const auto is_owned = [](const Slot & slot) { return slot.il >= 0; };
    const auto n_owned = std::count_if(slots_.begin(), slots_.begin() + n_usable_, is_owned);
    require(n_free_ + n_owned == n_usable_, "free + owned = usable", [&] {
        return std::to_string(n_free_) + " + " + std::to_string(n_owned) + ", not " + std::to_string(n_usable_);
    });
    uint64_t n_used = 0, n_pinned = 0;
    int n_ready = 0;
    for (int s = 0; s < n_slots(); s++) {
        check_slot(s);
        n_used += is_owned(slots_[s]);
        n_pinned += slots_[s].pins > 0;
        n_ready += __builtin_popcount(ready(s));
    }
    for (int key = 0; key < (int)slot_of_.size(); key++) {
        const int s = slot_of_[key];
        require(s < 0 || layout_.key(slots_[s].il, slots_[s].expert) == key, "each expert's slot holds it", [&] {
            return describe(s) + ", and is the slot of expert " + std::to_string(key % layout_.n_expert_max);
        });
    }
    require(get(counters_.slots_used) == n_used && get(counters_.slots_pinned) == n_pinned, "gauges count slots", [&] {
        return std::to_string(n_used) + " slots are used and " + std::to_string(n_pinned) + " pinned, not " +
               std::to_string(counters_.slots_used) + " and " + std::to_string(counters_.slots_pinned);
    });
    require(n_absent_ + n_ready == set_.n_chunks, "absent + ready = all matrices", [&] {
        return std::to_string(n_absent_) + " + " + std::to_string(n_ready) + ", not " + std::to_string(set_.n_chunks);
    });
}

void Residency::check_slot(int s) const {
    const Slot & slot = slots_[s];
    const auto description = [&] { return describe(s); };
    require(slot.pins >= 0, "pins >= 0", description);
    require(slot.il >= 0 || slot.pins + slot.queued + slot.reading == 0, "a free slot is unused", description);
    require(slot.expert < 0 || find(slot.il, slot.expert) == s, "the map names the slot of each expert", description);
    require(order_.contains(s) == evictable(s), "the order of eviction holds what may be evicted", description);
}

std::string Residency::describe(int s) const {
    const Slot & slot = slots_[s];
    return "slot " + std::to_string(s) + " holds expert " + std::to_string(slot.expert) + " of layer " +
           std::to_string(slot.il) + " and has " + std::to_string(slot.pins) + " pins";
}

void Residency::set_usable(int n) {
    n_usable_ = n;
    n_free_ = (int)std::count_if(slots_.begin(), slots_.begin() + n, [](const Slot & slot) { return slot.il < 0; });
    set_floors();
    for (int s = 0; s < n_slots(); s++) { update_order(s); }
}

} // namespace moegguf
