// staged_supply.cpp: supplies experts for prompts and other large passes on a device that has staging tensors. It
// serves the events that have more tokens than Tier::slot_tokens. A layer's experts are copied into a staging tensor
// with the layer's full shape, and kernels find them there by the router's own ids. So kernels compute as if every
// expert were resident. Slots keep their experts until the last pass of the announced tokens, which may assign slots to
// the most used experts.
//
// This supply may pin, assign and vacate slots of staging tiers. It may fill slots of the device with a prompt's
// experts, borrow slots as sources of its copies, and queue copies into staging tensors and slots.
#include "supply.h"

#include <algorithm>

namespace moegguf {
namespace {

// An expert may evict another one after a prompt's last pass if at least this many of the pass's tokens used the
// expert. In a pass that decodes, one token is enough.
constexpr int least_tokens_to_evict = 2;

// A later layer's experts that are complete on the device or in RAM are copied in advance if the pass has at least this
// many choices per expert. Tokens that choose evenly would then use about half of the layer's experts (1 - e^-0.7).
constexpr float choices_per_expert = 0.7f;

// The staged supply for all devices of a store. Layers use the staging tensors of a device in turn, even if the slots
// of these layers are in several tiers. If a device has two tensors, experts of the next layer can be copied into one
// tensor while a layer is computed with the other.
class StagedSupply final : public Supply {
  public:
    StagedSupply(const Layout & layout, Shared & shared, Transfers & transfers, Tiers & tiers)
        : Supply(layout, shared, transfers),
          tiers_(tiers),
          shortens_(layout.layers.size(), 0),
          counts_(layout.n_expert_max, 0) {}

    // Records which layers are computed only for tokens whose logits are needed. If this event is not staged, drops the
    // copies for later layers, and waits for copies that have begun.
    void observe(Context & context, Lock & lock) override {
        if (tiers_.staging.empty()) { return; }
        const Pass & pass = context.pass;
        // A new pass begins, and the previous pass had no event in the layers after last_il_, so these layers are
        // computed only for tokens whose logits are needed.
        if (pass.il <= last_il_ && last_tokens_ > 1) {
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

    // Pins the event's experts in the layer's staging tensor, and queues demands for the absent ones. First waits for
    // copies that an earlier layer queued, so that later choices do not depend on the speed of copies.
    bool place(Context & context, Lock & lock) override {
        context.pinned.tier->staged_for = &tiers_.of(context.event.il);
        if (!take_tensor(context, lock)) {
            context.fail(MOEGGUF_CANCELLED, "cancelled");
            return false;
        }
        Event & event = context.event;
        // Each absent expert has its own slot in the tensor, and no copy uses this slot after take_tensor().
        for (int expert : event.experts) {
            if (event.slot_of[expert] >= 0) { continue; }
            const int s = context.pinned.tier->assign(event.il, expert, event.step);
            context.pinned.pin(s);
            event.slot_of[expert] = s;
        }
        transfers_.demand(*context.pinned.tier, context.pinned.slots);
        event.wait_kinds = all_kinds;
        return true;
    }

    // Drops the copies for later layers. A copy that has begun continues, and its source slot stays pinned until the
    // copy ends.
    void drop_ahead() override {
        for (const auto & tier : tiers_.staging) { drop(*tier, nullptr); }
    }

    // Assigns slots to the most used experts if the pass is the last one of the announced tokens. Then queues copies of
    // the next layer's experts, and replaces expert ids with slot ids.
    void finish(Context & context) override {
        Lock lock(shared_.mutex);
        std::fill(counts_.begin(), counts_.end(), 0);
        for (size_t i = 0; i < context.event.n_ids(); i++) { counts_[context.event.ids[i]] += 1; }
        if (context.announced.next >= context.announced.n_tokens) { keep_most_used(context, lock); }
        // Every staging tensor except this layer's can get the experts of a later layer.
        const int n_tensors = context.pinned.tier->numbering.n_slots() / layout_.n_expert_max;
        int il = context.pass.il, n_tokens = context.pass.n_tokens;
        for (int n = 1; n < n_tensors && next_layer(context, il, n_tokens); n++) {
            copy_layer_ahead(il, n_tokens, context.pass.il);
        }
        lock.unlock();
        Supply::finish(context);
    }

  private:
    // Waits until no slot of the device's staging tensors is pinned: a cancelled pass may have left copies whose
    // sources are these slots. Then pins the event's experts that are present or on their way, queues demands for their
    // missing matrices, and waits for all copies into the tensors. Returns false if a wait was cancelled.
    bool take_tensor(Context & context, Lock & lock) {
        Tier & tier = *context.pinned.tier;
        const Event & event = context.event;
        const auto is_free = [&] { return get(tier.counters.slots_pinned) == 0; };
        const auto come = [&] { return !tier.busy(); };
        if (!is_free() && !stall(shared_, tier, lock, is_free)) { return false; }
        tier.staged_for->residency.on_routing(event.il, event.ids, event.n_expert_used, event.n_tokens);
        drop(tier, &event);
        pin_there(context);
        transfers_.demand(tier, context.pinned.slots); // queued before copies for later layers
        return come() || stall(shared_, tier, lock, come);
    }

    // Pins the event's experts that are in the tensor or on their way, and counts look-ups. An expert that is not
    // complete in a slot on the device counts as a miss there, even if it is in the tensor. In that case, it also
    // counts as a hit in RAM.
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
            tier.residency.clear_failed(s); // the failure belongs to a pass that has ended
            context.pinned.pin(s);
            event.slot_of[expert] = s;
            if (!has_slot) {
                in_ram.add(event.il, expert, true);
                if (const int r = ram.residency.find(event.il, expert); r >= 0) { ram.residency.touch(r); }
            }
        }
        count(shared_.counters.prefetch_useful, n_useful);
    }

    // Vacates unpinned slots of a staging tier, so that the result does not depend on the speed of copies. Experts that
    // the event `keep` chose stay. All other incomplete experts are dropped, in every layer. Prefetched experts that no
    // event has used are dropped, too, if they belong to the event's layer, or if there is no event.
    void drop(Tier & tier, const Event * keep) {
        for (int s = 0; s < tier.residency.n_slots(); s++) {
            const Slot & slot = tier.residency.slot(s);
            if (slot.il < 0 || slot.pins > 0) { continue; }
            const bool chosen = keep && slot.il == keep->il && keep->slot_of[slot.expert] != Event::not_chosen;
            const bool in_vain = slot.prefetched && (!keep || slot.il == keep->il);
            if (!chosen && (in_vain || !tier.residency.complete(s))) {
                tier.residency.drop(s, all_kinds);
                tier.vacate(s); // does nothing while a copy into the slot is under way
            }
        }
    }

    // Assigns slots to the pass's most used experts, because the answer will probably use them, too. The number of
    // candidates is at most a layer's equal share of the slots, or the number of experts that one token uses, if that
    // is larger. Candidates without a slot get free slots. If no slot is free, a candidate may get the slot of a
    // victim. This requires a pass that decodes, or at least least_tokens_to_evict tokens that used the candidate.
    // Waits for the copies into these slots.
    void keep_most_used(Context & context, Lock & lock) {
        const Event & event = context.event;
        Tier &from = *context.pinned.tier, &to = *from.staged_for;
        const int n_layers = (int)to.layers.moe_layers.size(), il = event.il;
        const size_t most = std::max(to.layers.n_used_max, to.residency.n_usable() / n_layers);
        std::vector<int> chosen = event.experts;
        std::stable_sort(chosen.begin(), chosen.end(), [&](int a, int b) { return counts_[a] > counts_[b]; });
        chosen.resize(std::min(chosen.size(), most));
        // Chosen experts that have a slot become the most recently used, so that the loop below does not evict them.
        for (int expert : chosen) {
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

    // Finds the layer after `il` that is computed next for all tokens of a pass, in this pass or in the next pass of
    // the announced tokens. Writes the layer to `il`, and that pass's number of tokens to n_tokens. Returns false if
    // the next layer is not known.
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

    // Queues copies of a later layer's experts into its staging tensor, if the pass has enough tokens
    // (choices_per_expert). With fewer tokens, too many experts would be copied unnecessarily. Does nothing if the
    // layer would use the same tensor as the layer that is being computed (`computing`).
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

    // Queues a copy of an expert into the expert's place in the staging tensor, if a slot on the device or in RAM holds
    // the whole expert. Evicts only an expert that an earlier layer left in that place. Returns false if no copy was
    // queued.
    bool borrow(Tier & to, int il, int expert) {
        const auto whole = [&](Tier & tier) {
            const int s = tier.residency.find(il, expert);
            return s >= 0 && tier.residency.complete(s) ? s : -1;
        };
        Tier &slots = tiers_.of(il), &from = whole(slots) >= 0 ? slots : *to.ram();
        const int source = whole(from), s = source >= 0 ? to.assign(il, expert, {il, false, false, 0}) : -1;
        if (s < 0) { return false; }
        to.residency.mark_prefetched(s);
        to.borrow(s, from, source, false);
        transfers_.copy(to, s, false);
        return true;
    }

    Tiers & tiers_;
    bool ahead_ = false;            // true: a copy for a later layer may be queued or under way
    std::vector<uint8_t> shortens_; // [n_layer] 1: the layer is computed only for tokens whose logits are needed
    int last_il_ = -1;              // layer of the previous event
    int last_tokens_ = 0;           // number of tokens in the previous event's pass
    std::vector<int> counts_;       // [n_expert_max] number of times that the event's tokens chose each expert
};

} // namespace

std::unique_ptr<Supply> make_staged_supply(const Layout & layout, Shared & shared, Transfers & transfers,
                                           Tiers & tiers) {
    return std::make_unique<StagedSupply>(layout, shared, transfers, tiers);
}

} // namespace moegguf
