#include "slot_supply.h"

#include <algorithm>

namespace moegguf {

bool SlotSupply::place(Context & context, Lock & lock) {
    Event & event = context.event;
    Pinned & pinned = context.pinned;
    pin_present(context, INT32_MAX);
    if (shared_.has(MOEGGUF_PREEMPT) && !pinned.tier->numbering.resident()) {
        transfers_.drop_prefetches(event.il);
    }
    if (!pin_absent(context, lock)) {
        return false;
    }
    pinned.tier->residency.on_routing(event.il, event.ids, event.n_expert_used, event.n_tokens);
    transfers_.demand(*pinned.tier, pinned.slots);
    if (pinned.stream && !pinned.awaits_file(all_kinds)) {
        event.wait_kinds = all_kinds; // the stream waits for copies, so the layer need not stop again
    }
    return true;
}

bool SlotSupply::pin_absent(Context & context, Lock & lock) {
    Event & event = context.event;
    Tier & tier = *context.pinned.tier;
    const bool fits = (int)event.experts.size() <= tier.residency.n_usable();
    for (int expert : event.experts) {
        if (event.slot_of[expert] != Event::no_slot_yet) {
            continue;
        }
        const auto take = [&] { return tier.take_slot(event.il, expert, event.step); };
        const int s = fits ? wait_for_slot(context, take, lock) : -1;
        if (s < 0) {
            fail_without_slot(context, expert);
            return false;
        }
        context.pinned.pin(s);
        event.slot_of[expert] = s;
    }
    return true;
}

} // namespace moegguf
