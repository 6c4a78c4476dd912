#include "staging.h"

#include <algorithm>
#include <cmath>

namespace moegguf {
namespace {

constexpr float prior_tokens = 8.0f;     // that a layer is supposed to have had, which use all experts alike
constexpr float most_tokens = 4096.0f;   // beyond which what is known fades
constexpr float least_chance = 0.5f;     // of an expert that is copied ahead
constexpr int least_tokens_to_evict = 2; // of a prompt's last pass that use an expert which makes another one go
constexpr auto longest_wait = std::chrono::seconds(60);

} // namespace

PromptStaging::PromptStaging(const Layout & layout, Shared & shared, Tiers & tiers, Transfers & transfers)
    : layout_(layout),
      shared_(shared),
      tiers_(tiers),
      transfers_(transfers),
      on_(std::any_of(tiers.staging.begin(), tiers.staging.end(), [](const auto & tier) { return tier != nullptr; })),
      uses_(layout.n_keys(), 0.0f),
      tokens_(layout.layers.size(), 0.0f),
      shortens_(layout.layers.size(), 0),
      counts_(layout.n_expert_max, 0) {
}

// Until it is done; false when it will not be.
template <typename Done>
bool PromptStaging::wait(Done done, Lock & lock) {
    const auto deadline = std::chrono::steady_clock::now() + longest_wait;
    while (!done()) {
        if (shared_.cancelled || shared_.stopping || (shared_.simulated() && transfers_.idle())) {
            return false;
        }
        if (shared_.simulated()) {
            transfers_.step();
        } else if (shared_.done.wait_until(lock, deadline) == std::cv_status::timeout) {
            return false;
        }
    }
    return true;
}

template <typename Done>
bool PromptStaging::wait_for_bytes(Lane & lane, Done done, Lock & lock) {
    if (done()) {
        return true;
    }
    const uint64_t start = shared_.clock_ns();
    const bool came = wait(done, lock);
    const uint64_t stall_ns = shared_.clock_ns() - start;
    count_stall(shared_, *lane.tier, stall_ns);
    lane.waited_ns += shared_.simulated() ? 0 : stall_ns;
    return came;
}

// An event of a layer that is staged.

bool PromptStaging::place(Lane & lane, const Moment & now, Lock & lock) {
    const bool can = settle(lane, now.il, lock);
    shared_.done.notify_all(); // other lanes may wait for this
    if (!can) {
        lane.fail(shared_.cancelled ? MOEGGUF_CANCELLED : MOEGGUF_SLOTS, now.il, -1,
                  shared_.cancelled ? "cancelled" : "another context has kept a layer's staging tensor for a minute");
        return false;
    }
    pin_rest(lane, now);
    transfers_.demand(*lane.tier, lane.pinned);
    return true;
}

// No other lane computes with the tensors, and nothing is on its way to them. false: they will not come to that.
bool PromptStaging::settle(Lane & lane, int il, Lock & lock) {
    Tier & tier = *lane.tier;
    if (!wait_for_bytes(lane, [&] { return !settling_ && get(tier.counters.slots_pinned) == 0; }, lock)) {
        return false;
    }
    struct Settling {
        explicit Settling(bool & on) : on(on) { on = true; }
        ~Settling() { on = false; }
        bool & on;
    } settling(settling_);
    count_look_ups(lane, il);
    drop(tier, &lane, il);
    pin_there(lane, il);
    transfers_.demand(tier, lane.pinned); // before what comes ahead
    return wait_for_bytes(lane, [&] { return !tier.busy(); }, lock);
}

// Of the slots on the device: what has none there is missed, even where it came ahead.
void PromptStaging::count_look_ups(const Lane & lane, int il) {
    Tier & slots = *lane.tier->staged_for;
    uint64_t n_ready = 0, n_useful = 0;
    for (int expert : lane.distinct) {
        slots.residency.count_look_up(il, expert);
        const int s = slots.residency.find(il, expert);
        if (s >= 0 && slots.residency.complete(s)) {
            n_ready += 1;
            n_useful += slots.residency.request(s);
        }
    }
    const uint64_t n = lane.distinct.size();
    count(slots.counters.lookups, n);
    count(slots.counters.hits_ready, n_ready);
    count(slots.counters.misses, n - n_ready);
    count(shared_.counters.prefetch_useful, n_useful);
}

// Those that came ahead, or are on their way. They were looked up in RAM when they were asked for, and count now.
void PromptStaging::pin_there(Lane & lane, int il) {
    Tier &tier = *lane.tier, &slots = *tier.staged_for, &below = *tier.below();
    uint64_t n_ready = 0, n_late = 0;
    for (int expert : lane.distinct) {
        const int s = tier.residency.find(il, expert);
        if (s < 0) {
            continue;
        }
        (tier.residency.complete(s) ? n_ready : n_late) += 1;
        tier.residency.request(s);
        tier.residency.forgive(s); // of passes that have ended
        tier.residency.pin(s);
        lane.pinned.push_back(s);
        lane.slot_of[expert] = s;
        const int own = slots.residency.find(il, expert);
        if (own < 0 || !slots.residency.complete(own)) {
            count(below.counters.lookups);
            count(below.counters.hits_ready);
            below.residency.count_look_up(il, expert);
            if (const int r = below.residency.find(il, expert); r >= 0) {
                below.residency.touch(r);
            }
        }
    }
    count(tier.counters.lookups, lane.distinct.size());
    count(tier.counters.hits_ready, n_ready);
    count(tier.counters.hits_late, n_late);
    count(tier.counters.misses, lane.distinct.size() - n_ready - n_late);
}

// Each place is free: nothing is on its way there, and no layer is computed with it.
void PromptStaging::pin_rest(Lane & lane, const Moment & now) {
    for (int expert : lane.distinct) {
        if (lane.slot_of[expert] >= 0) {
            continue;
        }
        const int s = lane.tier->take_slot(now.il, expert, now);
        lane.tier->residency.pin(s);
        lane.pinned.push_back(s);
        lane.slot_of[expert] = s;
    }
}

// What is not whole, and what came ahead, but for the experts of the lane's event and what is there of other layers:
// what stays does not depend on how fast it came.
void PromptStaging::drop(Tier & tier, const Lane * keep, int il) {
    for (int s = 0; s < tier.residency.n_slots(); s++) {
        const Slot & slot = tier.residency.slot(s);
        if (slot.il < 0 || slot.pins > 0) {
            continue;
        }
        const bool chosen = keep && slot.il == il && keep->slot_of[slot.expert] != Lane::not_chosen;
        const bool in_vain = slot.prefetched && (!keep || slot.il == il);
        if (!chosen && (in_vain || !tier.residency.complete(s))) {
            tier.residency.drop(s, all_kinds);
            tier.retire(s); // when it has arrived, where a copy has begun
        }
    }
}

void PromptStaging::drop_ahead() {
    for (const auto & tier : tiers_.staging) {
        if (tier) {
            drop(*tier, nullptr, -1);
        }
    }
}

void PromptStaging::drop_ahead(Lock & lock) {
    if (!ahead_) {
        return;
    }
    drop_ahead();
    for (const auto & tier : tiers_.staging) {
        if (tier) {
            wait([&] { return !tier->reading(); }, lock);
        }
    }
    ahead_ = false;
}

void PromptStaging::note_pass(const Lane & lane, int n_tokens) {
    if (!on_) {
        return;
    }
    if (lane.il <= last_il_ && last_tokens_ > 1) { // the pass before has left out the layers behind its last
        std::fill(shortens_.begin() + last_il_ + 1, shortens_.end(), 1);
    }
    last_il_ = lane.il;
    last_tokens_ = lane.n_tokens;
    if (lane.n_tokens > 1) {
        shortens_[lane.il] = n_tokens < lane.n_tokens;
    }
}

void PromptStaging::finish(Lane & lane, const int32_t * ids, int n_expert_used, int n_tokens, Lock & lock) {
    learn(lane, ids, n_expert_used, n_tokens);
    if (lane.next_token >= lane.n_announced) {
        adopt(lane, lock);
    }
    copy_ahead(lane);
}

void PromptStaging::learn(const Lane & lane, const int32_t * ids, int n_expert_used, int n_tokens) {
    float * uses = &uses_[layout_.key(lane.il, 0)];
    std::fill(counts_.begin(), counts_.end(), 0);
    for (int i = 0; i < n_expert_used * n_tokens; i++) {
        counts_[ids[i]] += 1;
    }
    tokens_[lane.il] += (float)n_tokens;
    for (int expert : lane.distinct) {
        uses[expert] += (float)counts_[expert];
    }
    if (tokens_[lane.il] > most_tokens) {
        tokens_[lane.il] /= 2;
        std::for_each(uses, uses + layout_.layers[lane.il].n_expert, [](float & n) { n /= 2; });
    }
}

// The experts that most tokens of the pass used, as many as are a layer's share of the slots: an answer begins with
// them. They take free slots, or those of the least recently used. Waits for the copies: what comes later finds it
// done.
void PromptStaging::adopt(Lane & lane, Lock & lock) {
    Tier &from = *lane.tier, &to = *from.staged_for;
    const int n_layers = (int)to.layers.moe_layers.size(), il = lane.il;
    const size_t most = std::max(to.layers.n_used_max, to.residency.n_usable() / n_layers);
    std::vector<int> chosen = lane.distinct;
    std::stable_sort(chosen.begin(), chosen.end(), [&](int a, int b) { return counts_[a] > counts_[b]; });
    chosen.resize(std::min(chosen.size(), most));
    for (int expert : chosen) { // those that are there are not evicted for the others
        if (const int s = to.residency.find(il, expert); s >= 0) {
            to.residency.touch(s);
        }
    }
    std::vector<Place> adopted; // of this lane: the lock is free while it waits
    const Moment now = {il, false, false, transfers_.turn()};
    for (int expert : chosen) {
        const bool worth =
            to.residency.has_free() || counts_[expert] >= least_tokens_to_evict || lane.phase == MOEGGUF_DECODE;
        const int s = worth && to.residency.find(il, expert) < 0 ? to.take_slot(il, expert, now) : -1;
        if (s >= 0) {
            to.borrow(s, from, lane.slot_of[expert]);
            transfers_.copy(to, s, true);
            adopted.push_back(to.place(s));
        }
    }
    const auto done = [&](const Place & place) {
        const Slot & slot = to.residency.slot(place.slot);
        return !to.holds(place) || (slot.queued == 0 && slot.reading == 0);
    };
    wait_for_bytes(lane, [&] { return std::all_of(adopted.begin(), adopted.end(), done); }, lock);
}

// Copying ahead: as many layers as there are tensors that none is computed with.

void PromptStaging::copy_ahead(const Lane & lane) {
    const int n_tensors = lane.tier->numbering.n_slots() / layout_.n_expert_max;
    int il = lane.il, n_tokens = lane.n_tokens;
    for (int n = 1; n < n_tensors && next_layer(lane, il, n_tokens); n++) {
        copy_layer_ahead(il, n_tokens, lane.il);
    }
}

// The layer that is computed next for many tokens, in this pass or in the next one of the same prompt. false: not
// known.
bool PromptStaging::next_layer(const Lane & lane, int & il, int & n_tokens) const {
    const std::vector<int> & layers = layout_.moe_layers;
    const auto whole = [&](int layer) { return !shortens_[layer]; };
    auto next = std::find_if(layers.begin() + layout_.row_of[il] + 1, layers.end(), whole);
    if (next == layers.end() && il >= lane.il) {
        n_tokens = std::min(n_tokens, lane.n_announced - lane.next_token);
        next = n_tokens > 0 ? std::find_if(layers.begin(), layers.end(), whole) : next;
    }
    if (next == layers.end()) {
        return false;
    }
    il = *next;
    return true;
}

void PromptStaging::copy_layer_ahead(int il, int n_tokens, int computing) {
    Tier & to = tiers_.of(il, n_tokens);
    const Window window = to.numbering.window(il);
    const bool in_use =
        &to == tiers_.of(computing).staging && to.numbering.window(computing).first_slot == window.first_slot;
    if (to.id != TierId::staging || in_use) {
        return;
    }
    for (int expert = 0; expert < window.n_slots; expert++) {
        if (chance(il, expert, n_tokens) > least_chance && to.residency.find(il, expert) < 0) {
            ahead_ = borrow(to, il, expert) || ahead_;
        }
    }
}

// Only what is in a slot, on the device or in RAM: nothing makes room, so that slots stay as they are.
bool PromptStaging::borrow(Tier & to, int il, int expert) {
    const auto whole = [&](Tier & tier) {
        const int s = tier.residency.find(il, expert);
        return s >= 0 && tier.residency.complete(s) ? s : -1;
    };
    Tier & from = whole(*to.staged_for) >= 0 ? *to.staged_for : *to.below();
    const int source = whole(from), s = source >= 0 ? to.take_slot(il, expert, {il, false, false, 0}) : -1;
    if (s < 0) { // or another context computes with the tensor
        return false;
    }
    to.residency.mark_prefetched(s);
    to.borrow(s, from, source);
    transfers_.copy(to, s, false);
    return true;
}

// Of an expert to be used by one of so many tokens, as prompts used it so far.
float PromptStaging::chance(int il, int expert, int n_tokens) const {
    const Layer & layer = layout_.layers[il];
    const float prior = prior_tokens * (float)layer.n_expert_used / (float)layer.n_expert;
    const float share = std::min(1.0f, (uses_[layout_.key(il, expert)] + prior) / (tokens_[il] + prior_tokens));
    return 1.0f - std::pow(1.0f - share, (float)n_tokens);
}

} // namespace moegguf
