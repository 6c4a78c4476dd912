// staged_supply.cpp: supplies prompts on a device. A layer's experts are copied into a tensor of the layer's full
// shape, where the router's own ids find them. So kernels compute as if every expert were resident, and slots keep
// their experts.
//
// It may pin, assign and vacate slots of staging tiers, fill slots of the device with a prompt's experts, and order
// copies into both.
#include "supply.h"

#include <algorithm>

namespace moegguf {
namespace {

constexpr int least_tokens_to_evict = 2; // an expert that fewer tokens of a prompt's last pass use evicts no other one

// A layer is copied ahead if a pass has at least this number of choices per expert. Tokens that choose evenly then use
// more than half of the layer's experts (1 - e^-0.7).
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

    // Drops the transfers ahead if the event is not staged.
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

    // Waits for the experts that come ahead, so that later choices do not depend on the speed of their copies.
    bool place(Context & context, Lock & lock) override {
        if (!take_tensor(context, lock)) {
            context.fail(MOEGGUF_CANCELLED, "cancelled");
            return false;
        }
        Event & event = context.event;
        for (int expert : event.experts) { // take_tensor() has freed the own slot of each expert that is not there
            if (event.slot_of[expert] >= 0) { continue; }
            const int s = context.pinned.tier->assign(event.il, expert, event.step);
            context.pinned.pin(s);
            event.slot_of[expert] = s;
        }
        transfers_.demand(*context.pinned.tier, context.pinned.slots);
        event.wait_kinds = all_kinds;
        return true;
    }

    // Drops the transfers ahead. The slots that they come from are free once the copies under way are done.
    void drop_ahead() override {
        for (const auto & tier : tiers_.staging) { drop(*tier, nullptr); }
    }

    // Gives experts of a prompt's last pass to slots, and copies the experts of the next layer ahead.
    void finish(Context & context) override {
        Lock lock(shared_.mutex);
        std::fill(counts_.begin(), counts_.end(), 0);
        for (size_t i = 0; i < context.event.n_ids(); i++) { counts_[context.event.ids[i]] += 1; }
        if (context.announced.next >= context.announced.n_tokens) { keep_most_used(context, lock); }
        // Each tensor that no layer computes with can have a layer ahead.
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
        transfers_.demand(tier, context.pinned.slots); // demands come before copies ahead
        return come() || stall(shared_, tier, lock, come);
    }

    // Pins the experts that came ahead, or are on their way. An expert without a slot on the device is a miss there,
    // even if it came ahead. Experts in RAM were looked up when they were requested, and count now.
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
            tier.residency.clear_failed(s); // the failure was for passes that have ended
            context.pinned.pin(s);
            event.slot_of[expert] = s;
            if (!has_slot) {
                in_ram.add(event.il, expert, true);
                if (const int r = ram.residency.find(event.il, expert); r >= 0) { ram.residency.touch(r); }
            }
        }
        count(shared_.counters.prefetch_useful, n_useful);
    }

    // Drops experts that are not whole, and experts that came ahead. The experts of the event stay, and so do whole
    // experts of other layers. So the result does not depend on the speed of copies.
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

    // Gives slots to the experts that most tokens of the pass used, up to a layer's share of the slots, because an
    // answer begins with them. They take free slots, or the slots of the least recently used experts. Waits for the
    // copies.
    void keep_most_used(Context & context, Lock & lock) {
        const Event & event = context.event;
        Tier &from = *context.pinned.tier, &to = *from.staged_for;
        const int n_layers = (int)to.layers.moe_layers.size(), il = event.il;
        const size_t most = std::max(to.layers.n_used_max, to.residency.n_usable() / n_layers);
        std::vector<int> chosen = event.experts;
        std::stable_sort(chosen.begin(), chosen.end(), [&](int a, int b) { return counts_[a] > counts_[b]; });
        chosen.resize(std::min(chosen.size(), most));
        for (int expert : chosen) { // chosen experts that are there must not be evicted for the others
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
    bool ahead_ = false;            // a transfer ahead may be on its way
    std::vector<uint8_t> shortens_; // [n_layer] the layer computes only the tokens whose logits are needed
    int last_il_ = -1;              // layer of the event before
    int last_tokens_ = 0;           // tokens of the pass of the event before
    std::vector<int> counts_;       // [n_expert_max] tokens of the event that use an expert
};

} // namespace

std::unique_ptr<Supply> make_staged_supply(const Layout & layout, Shared & shared, Transfers & transfers,
                                           Tiers & tiers) {
    return std::make_unique<StagedSupply>(layout, shared, transfers, tiers);
}

} // namespace moegguf
