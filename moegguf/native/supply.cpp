#include "supply.h"

#include "copies.h"

namespace moegguf {

bool Supply::place(Context & context, Lock & lock) {
    Event & event = context.event;
    Pinned & pinned = context.pinned;
    pin_present(context, INT32_MAX);
    if (shared_.has(MOEGGUF_PREEMPT) && !pinned.tier->numbering.resident()) { transfers_.drop_prefetches(event.il); }
    if (!pin_absent(context, lock)) { return false; }
    pinned.tier->residency.on_routing(event.il, event.ids, event.n_expert_used, event.n_tokens);
    transfers_.demand(*pinned.tier, pinned.slots);
    if (pinned.stream && !pinned.awaits_file(all_kinds)) {
        event.wait_kinds = all_kinds; // the stream waits for copies, so the layer need not stop again
    }
    return true;
}

bool Supply::pin_absent(Context & context, Lock & lock) {
    Event & event = context.event;
    Tier & tier = *context.pinned.tier;
    const bool fits = (int)event.experts.size() <= tier.residency.n_usable();
    for (int expert : event.experts) {
        if (event.slot_of[expert] != Event::no_slot_yet) { continue; }
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

void Supply::release(Context & context) {
    for (int s : context.pinned.slots) { context.pinned.tier->unpin(s); }
    context.pinned.slots.clear();
    context.supply = nullptr;
}

void Supply::pin_present(Context & context, int most) {
    Event & event = context.event;
    Pinned & pinned = context.pinned;
    Residency & residency = pinned.tier->residency;
    LookUps look_ups(*pinned.tier);
    uint64_t n_useful = 0, n_late = 0;
    for (int expert : event.experts) {
        if ((int)pinned.slots.size() >= most) {
            look_ups.add(event.il, expert, false);
            continue;
        }
        const int s = look_ups.find(event.il, expert);
        if (s < 0) { continue; }
        if (residency.request(s)) { (residency.complete(s) ? n_useful : n_late) += 1; }
        if (residency.failed(s)) {
            residency.forgive(s); // for passes that have ended: this one reads again
        }
        pinned.pin(s);
        event.slot_of[expert] = s;
    }
    count(shared_.counters.prefetch_useful, n_useful);
    count(shared_.counters.prefetch_late, n_late);
}

void Supply::fail_without_slot(Context & context, int expert) {
    const int il = context.event.il;
    context.fail(shared_.cancelled ? MOEGGUF_CANCELLED : MOEGGUF_SLOTS, il, expert,
                 "one pass needs " + std::to_string(context.event.experts.size()) + " experts of layer " +
                     std::to_string(il) + " at once, the pool has " +
                     std::to_string(context.pinned.tier->residency.n_usable()) + " slots");
}

void Supply::wait(Context & context, uint8_t kinds) {
    Pinned & pinned = context.pinned;
    Tier * ram = pinned.tier->ram();
    if (shared_.forked()) { return; }
    if (!pinned.available(kinds) || shared_.cancelled) {
        Lock lock(shared_.mutex);
        const uint64_t start = shared_.clock->now_ns();
        uint64_t file_done = start; // until then something was still in the file
        bool from_file = false;
        stall(shared_, *pinned.tier, lock, [&] {
            file_done = from_file ? shared_.clock->now_ns() : file_done;
            from_file = ram && pinned.awaits_file(kinds);
            return pinned.decided(kinds);
        });
        if (ram) { count(ram->counters.stall_ns, file_done - start); }
        if (shared_.cancelled) { context.fail(MOEGGUF_CANCELLED, context.pass.il, -1, "cancelled"); }
        context.note_failures(shared_);
    }
    if (pinned.stream && kinds && !context.failed()) { // it waits for copies that are under way
        pinned.tier->copies->order(pinned.stream);
        pinned.ordered |= kinds;
    }
}

void Supply::finish(Context & context) {
    Event & event = context.event;
    const int first_slot = context.pinned.tier->numbering.window(event.il).first_slot;
    for (size_t i = 0; i < event.n_ids(); i++) { event.ids[i] = event.slot_of[event.ids[i]] - first_slot; }
}

} // namespace moegguf
