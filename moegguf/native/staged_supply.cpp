// staged_supply.cpp: prompts on a device. A layer's experts are copied into a tensor of the layer's full shape, where
// the router's own ids find them: kernels compute as if every expert were resident, and slots keep what they hold.
//
// It may pin, take and empty slots of staging tiers, fill slots of the same device with what a prompt leaves, and order
// copies into both.
#include "supply.h"

#include <algorithm>

namespace moegguf {
namespace {

constexpr int least_tokens_to_evict = 2; // of a prompt's last pass that use an expert which makes another one go

// From this many on, tokens that choose evenly use more than half of a layer's experts (1 - e^-0.7): it is copied
// ahead.
constexpr float choices_per_expert = 0.7f;

// Layers take a device's tensors in turn: while one is computed, the experts of the next are copied into another. One
// for all devices of a store.
class StagedSupply final : public Supply {
  public:
    StagedSupply(const Layout & layout, Shared & shared, Transfers & transfers, Tiers & tiers)
        : Supply(layout, shared, transfers),
          tiers_(tiers),
          shortens_(layout.layers.size(), 0),
          counts_(layout.n_expert_max, 0) {}

    // What is on its way ahead of an event that is not staged is dropped.
    void observe(Context & context, Lock & lock) override {
        if (tiers_.staging.empty()) { return; }
        const Pass & pass = context.pass;
        if (pass.il <= last_il_ && last_tokens_ > 1) { // the pass before has left out the layers behind its last
            std::fill(shortens_.begin() + last_il_ + 1, shortens_.end(), 1);
        }
        last_il_ = pass.il;
        last_tokens_ = pass.n_tokens;
        if (pass.n_tokens > 1) { shortens_[pass.il] = context.event.n_tokens < pass.n_tokens; }
        if (ahead_ && context.pinned.tier->id != TierId::staging) {
            drop_ahead();
            for (const auto & tier : tiers_.staging) {
                shared_.wait(lock, [&] { return !tier->busy(); });
            }
            ahead_ = false;
        }
    }

    // What came ahead is there when this returns, so that what is chosen then does not depend on how fast it came.
    bool place(Context & context, Lock & lock) override {
        if (!take_tensor(context, lock)) {
            context.fail(MOEGGUF_CANCELLED, "cancelled");
            return false;
        }
        Event & event = context.event;
        for (int expert : event.experts) { // of the others each one's own slot is free: take_tensor() has seen to that
            if (event.slot_of[expert] >= 0) { continue; }
            const int s = context.pinned.tier->assign(event.il, expert, event.step);
            context.pinned.pin(s);
            event.slot_of[expert] = s;
        }
        transfers_.demand(*context.pinned.tier, context.pinned.slots);
        event.wait_kinds = all_kinds;
        return true;
    }

    // What is on its way ahead will not come: slots that it comes from are free once the copies under way are done.
    void drop_ahead() override {
        for (const auto & tier : tiers_.staging) { drop(*tier, nullptr); }
    }

    // Gives experts of the last pass of a prompt's to slots, and copies those of the next layer ahead.
    void finish(Context & context) override {
        Lock lock(shared_.mutex);
        std::fill(counts_.begin(), counts_.end(), 0);
        for (size_t i = 0; i < context.event.n_ids(); i++) { counts_[context.event.ids[i]] += 1; }
        if (context.announced.next >= context.announced.n_tokens) { keep_most_used(context, lock); }
        // As many layers ahead as there are tensors that none is computed with.
        const int n_tensors = context.pinned.tier->numbering.n_slots() / layout_.n_expert_max;
        int il = context.pass.il, n_tokens = context.pass.n_tokens;
        for (int n = 1; n < n_tensors && next_layer(context, il, n_tokens); n++) {
            copy_layer_ahead(il, n_tokens, context.pass.il);
        }
        lock.unlock();
        Supply::finish(context);
    }

  private:
    // Nothing is on its way to the tensor any more, or from it, as after a cancelled pass. false: it will not come to
    // that.
    bool take_tensor(Context & context, Lock & lock) {
        Tier & tier = *context.pinned.tier;
        const Event & event = context.event;
        const auto is_free = [&] { return get(tier.counters.slots_pinned) == 0; };
        const auto come = [&] { return !tier.busy(); };
        if (!is_free() && !stall(shared_, tier, lock, is_free)) { return false; }
        tier.staged_for->residency.on_routing(event.il, event.ids, event.n_expert_used, event.n_tokens);
        drop(tier, &event);
        pin_there(context);
        transfers_.demand(tier, context.pinned.slots); // before what comes ahead
        return come() || stall(shared_, tier, lock, come);
    }

    // Those that came ahead, or are on their way. Of the slots on the device, what has none there is missed, even where
    // it came ahead; in RAM these were looked up when they were asked for, and count now.
    void pin_there(Context & context) {
        Event & event = context.event;
        Tier &tier = *context.pinned.tier, &slots = *tier.staged_for, &ram = *tier.ram();
        LookUps in_tensor(tier), in_slots(slots), in_ram(ram);
        uint64_t n_useful = 0;
        for (int expert : event.experts) {
            const int own = slots.residency.find(event.il, expert), s = in_tensor.find(event.il, expert);
            const bool has_slot = own >= 0 && slots.residency.complete(own);
            in_slots.add(event.il, expert, has_slot);
            n_useful += has_slot && slots.residency.request(own);
            if (s < 0) { continue; }
            tier.residency.request(s);
            tier.residency.clear_failed(s); // that was for passes that have ended
            context.pinned.pin(s);
            event.slot_of[expert] = s;
            if (!has_slot) {
                in_ram.add(event.il, expert, true);
                if (const int r = ram.residency.find(event.il, expert); r >= 0) { ram.residency.touch(r); }
            }
        }
        count(shared_.counters.prefetch_useful, n_useful);
    }

    // What is not whole, and what came ahead, but for the experts of the event and what is there of other layers: what
    // stays does not depend on how fast it came.
    void drop(Tier & tier, const Event * keep) {
        for (int s = 0; s < tier.residency.n_slots(); s++) {
            const Slot & slot = tier.residency.slot(s);
            if (slot.il < 0 || slot.pins > 0) { continue; }
            const bool chosen = keep && slot.il == keep->il && keep->slot_of[slot.expert] != Event::not_chosen;
            const bool in_vain = slot.prefetched && (!keep || slot.il == keep->il);
            if (!chosen && (in_vain || !tier.residency.complete(s))) {
                tier.residency.drop(s, all_kinds);
                tier.vacate(s); // when it has arrived, where a copy has begun
            }
        }
    }

    // The experts that most tokens of the pass used, as many as are a layer's share of the slots: an answer begins with
    // them. They take free slots, or those of the least recently used. Waits for the copies: what comes later finds it
    // done.
    void keep_most_used(Context & context, Lock & lock) {
        const Event & event = context.event;
        Tier &from = *context.pinned.tier, &to = *from.staged_for;
        const int n_layers = (int)to.layers.moe_layers.size(), il = event.il;
        const size_t most = std::max(to.layers.n_used_max, to.residency.n_usable() / n_layers);
        std::vector<int> chosen = event.experts;
        std::stable_sort(chosen.begin(), chosen.end(), [&](int a, int b) { return counts_[a] > counts_[b]; });
        chosen.resize(std::min(chosen.size(), most));
        for (int expert : chosen) { // those that are there are not evicted for the others
            if (const int s = to.residency.find(il, expert); s >= 0) { to.residency.touch(s); }
        }
        std::vector<SlotRef> kept;
        const LayerStep now = {il, false, false, transfers_.step()};
        for (int expert : chosen) {
            const bool worth = to.residency.has_free() || counts_[expert] >= least_tokens_to_evict ||
                               context.announced.phase == MOEGGUF_DECODE;
            const int s = worth && to.residency.find(il, expert) < 0 ? to.assign(il, expert, now) : -1;
            if (s >= 0) {
                to.borrow(s, from, event.slot_of[expert], false);
                transfers_.copy(to, s, true);
                kept.push_back(to.ref(s));
            }
        }
        const auto is_done = [&](const SlotRef & ref) {
            const Slot & slot = to.residency.slot(ref.slot);
            return !to.holds(ref) || (slot.queued == 0 && slot.reading == 0);
        };
        stall(shared_, from, lock, [&] { return std::all_of(kept.begin(), kept.end(), is_done); });
    }

    // The layer that is computed next for many tokens, in this pass or in the next one of the same prompt. false: not
    // known.
    bool next_layer(const Context & context, int & il, int & n_tokens) const {
        const std::vector<int> & layers = layout_.moe_layers;
        const auto whole = [&](int layer) { return !shortens_[layer]; };
        auto next = std::find_if(layers.begin() + layout_.row_of[il] + 1, layers.end(), whole);
        if (next == layers.end() && il >= context.pass.il) {
            n_tokens = std::min(n_tokens, context.announced.n_tokens - context.announced.next);
            next = n_tokens > 0 ? std::find_if(layers.begin(), layers.end(), whole) : next;
        }
        if (next == layers.end()) { return false; }
        il = *next;
        return true;
    }

    // All of it, where it has enough tokens: of fewer tokens' experts too many would come in vain.
    void copy_layer_ahead(int il, int n_tokens, int computing) {
        Tier & to = tiers_.of(il, n_tokens);
        const Window window = to.numbering.window(il);
        const bool in_use =
            &to == tiers_.of(computing).staging && to.numbering.window(computing).first_slot == window.first_slot;
        const Layer & layer = layout_.layers[il];
        if (to.id != TierId::staging || in_use ||
            n_tokens * layer.n_expert_used < choices_per_expert * layer.n_expert) {
            return;
        }
        for (int expert = 0; expert < window.n_slots; expert++) {
            if (to.residency.find(il, expert) < 0) { ahead_ = borrow(to, il, expert) || ahead_; }
        }
    }

    // Only what is in a slot, on the device or in RAM: nothing makes room, so that slots stay as they are.
    bool borrow(Tier & to, int il, int expert) {
        const auto whole = [&](Tier & tier) {
            const int s = tier.residency.find(il, expert);
            return s >= 0 && tier.residency.complete(s) ? s : -1;
        };
        Tier & from = whole(*to.staged_for) >= 0 ? *to.staged_for : *to.ram();
        const int source = whole(from), s = source >= 0 ? to.assign(il, expert, {il, false, false, 0}) : -1;
        if (s < 0) { return false; }
        to.residency.mark_prefetched(s);
        to.borrow(s, from, source, false);
        transfers_.copy(to, s, false);
        return true;
    }

    Tiers & tiers_;
    bool ahead_ = false;            // something may be on its way
    std::vector<uint8_t> shortens_; // [n_layer] computes fewer tokens than the pass has: those whose logits are wanted
    int last_il_ = -1;              // of the event before, as the tokens of its pass
    int last_tokens_ = 0;
    std::vector<int> counts_; // [n_expert_max] tokens of the event that use an expert
};

} // namespace

std::unique_ptr<Supply> make_staged_supply(const Layout & layout, Shared & shared, Transfers & transfers,
                                           Tiers & tiers) {
    return std::make_unique<StagedSupply>(layout, shared, transfers, tiers);
}

} // namespace moegguf
