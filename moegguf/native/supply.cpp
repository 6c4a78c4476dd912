// supply.cpp: implements supply.h: class Supply, which gives each expert its own slot, and the state of a context.
#include "supply.h"

#include "copies.h"
#include "switches.h"

#include <algorithm>
#include <cstdio>

namespace moegguf {

bool Supply::place(Context & context, Lock & lock) {
    Event & event = context.event;
    Pinned & pinned = context.pinned;
    pin_present(context, INT32_MAX);
    if (shared_.has(MOEGGUF_PREEMPT) && !pinned.tier->numbering.resident()) { transfers_.drop_prefetches(event.il); }
    Tier & tier = *pinned.tier;
    const auto is_absent = [&](int expert) { return event.slot_of[expert] == Event::no_slot_yet; };
    if (std::any_of(event.experts.begin(), event.experts.end(), is_absent)) { context.free_late(shared_, lock); }
    const bool fits = (int)event.experts.size() <= tier.residency.n_usable();
    for (int expert : event.experts) {
        if (!is_absent(expert)) { continue; }
        const auto take = [&] { return tier.assign(event.il, expert, event.step); };
        const int s = fits ? wait_for_slot(context, take, lock) : -1;
        if (s < 0) {
            fail_without_slot(context);
            return false;
        }
        pinned.pin(s);
        event.slot_of[expert] = s;
    }
    pinned.tier->residency.on_routing(event.il, event.ids, event.n_expert_used, event.n_tokens);
    const bool submits = is_on(Remedy::own_copies) && pinned.stream;
    transfers_.demand(*pinned.tier, pinned.slots, submits);
    if (submits) { tier.copies->submit_own(lock); }
    if (pinned.stream && !pinned.awaits_file(all_kinds)) {
        // Nothing has to come from the file, and the stream itself waits for copies. So this stop covers all matrices,
        // and the layer does not stop a second time.
        event.wait_kinds = all_kinds;
    }
    return true;
}

void Supply::release(Context & context) {
    context.pinned.unpin();
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
            residency.clear_failed(s); // the failure belongs to a pass that has ended; this pass reads the expert again
        }
        pinned.pin(s);
        event.slot_of[expert] = s;
    }
    count(shared_.counters.prefetch_useful, n_useful);
    count(shared_.counters.prefetch_late, n_late);
}

void Supply::fail_without_slot(Context & context) {
    if (shared_.cancelled) { return context.fail(MOEGGUF_CANCELLED, "cancelled"); }
    context.fail(MOEGGUF_SLOTS, "one pass needs " + std::to_string(context.event.experts.size()) +
                                    " experts of layer " + std::to_string(context.event.il) +
                                    " at once, but the pool has " +
                                    std::to_string(context.pinned.tier->residency.n_usable()) +
                                    " slots; give a larger budget for experts");
}

void Supply::wait(Context & context, uint8_t kinds) {
    Pinned & pinned = context.pinned;
    Tier * ram = pinned.tier->ram();
    if (shared_.forked()) { return; }
    if (!pinned.available(kinds) || shared_.cancelled) {
        Lock lock(shared_.mutex);
        const uint64_t start = shared_.clock->now_ns();
        // The time at which the last awaited matrix had arrived from the file. Until then, the stall is also attributed
        // to the tier in RAM.
        uint64_t file_done = start;
        bool from_file = false;
        stall(shared_, *pinned.tier, lock, [&] {
            file_done = from_file ? shared_.clock->now_ns() : file_done;
            from_file = ram && pinned.awaits_file(kinds);
            return pinned.decided(kinds);
        });
        if (ram) { count(ram->counters.stall_ns, file_done - start); }
        if (shared_.cancelled) { context.fail(MOEGGUF_CANCELLED, "cancelled"); }
        context.note_failures(shared_);
    }
    const bool orders = !is_on(Remedy::late_notes) || pinned.pending(kinds);
    // Makes the stream wait for the copies that have been submitted.
    if (pinned.stream && kinds && orders && !context.failed()) {
        pinned.tier->copies->order(pinned.stream);
        pinned.ordered |= kinds;
    }
}

void Supply::finish(Context & context) {
    Event & event = context.event;
    const int first_slot = context.pinned.tier->numbering.window(event.il).first_slot;
    for (size_t i = 0; i < event.n_ids(); i++) { event.ids[i] = event.slot_of[event.ids[i]] - first_slot; }
}

// Functions of a context and of its parts.

const int32_t * Event::begin(const Choice & choice, int n_expert) {
    for (int expert : experts) { // clears the entries of the previous event, even if that event has failed
        slot_of[expert] = not_chosen;
    }
    experts.clear();
    (Choice &)* this = choice;
    keeps_ids = false;
    for (size_t i = 0; i < n_ids(); i++) {
        const int expert = ids[i];
        if (expert < 0 || expert >= n_expert) { return &ids[i]; }
        if (slot_of[expert] == not_chosen) {
            slot_of[expert] = no_slot_yet;
            experts.push_back(expert);
        }
    }
    return nullptr;
}

bool Pinned::available(uint8_t kinds) const {
    return std::all_of(slots.begin(), slots.end(),
                       [&](int s) { return !missing(s, kinds) && !tier->residency.failed(s); });
}

bool Pinned::decided(uint8_t kinds) const {
    return std::all_of(slots.begin(), slots.end(),
                       [&](int s) { return !missing(s, kinds) || tier->residency.failed(s); });
}

bool Pinned::pending(uint8_t kinds) const {
    const Residency & residency = tier->residency;
    return std::any_of(slots.begin(), slots.end(),
                       [&](int s) { return (chunks & kinds & ~ordered & ~residency.ready(s)) || residency.failed(s); });
}

bool Pinned::awaits_file(uint8_t kinds) const {
    return std::any_of(slots.begin(), slots.end(), [&](int s) {
        const int r = tier->source(s);
        const uint8_t in_ram = r >= 0 ? tier->source_tier(s).residency.ready(r) : 0;
        return chunks & kinds & ~tier->residency.ready(s) & ~in_ram;
    });
}

bool Pinned::noted() const {
    return std::none_of(slots.begin(), slots.end(), [&](int s) { return tier->residency.slot(s).reading & ordered; });
}

void Pinned::unpin() {
    for (int s : slots) { tier->unpin(s); }
    slots.clear();
    ordered = 0;
}

uint8_t Pinned::missing(int s, uint8_t kinds) const {
    if (tier->residency.slot(s).streams()) {
        return 0; // nothing is missing: kernels themselves wait for the experts that are streamed through this slot
    }
    // `submitted` is read before `ready`, so that a copy that ends between the two reads is seen in one of them.
    const uint8_t submitted = stream ? tier->copies->submitted(s) : 0;
    return chunks & kinds & ~submitted & ~tier->residency.ready(s);
}

int32_t * HostIds::space(ggml_backend_dev_t device, size_t n) {
    constexpr size_t least = 1024;
    std::vector<ggml_backend_buffer_ptr> & memory = memory_[device];
    const size_t n_bytes = n * sizeof(int32_t),
                 there = memory.empty() ? 0 : ggml_backend_buffer_get_size(memory.back().get());
    if (there < n_bytes) {
        const bool pinned = is_on(Remedy::pinned_ids);
        ggml_backend_buffer_type_t buft = pinned ? host_memory({device}).buft : ggml_backend_cpu_buffer_type();
        ggml_backend_buffer_ptr more(ggml_backend_buft_alloc_buffer(buft, std::max({least, n_bytes, 2 * there})));
        if (!more) { throw Error(MOEGGUF_MEMORY, "no memory for the ids of experts"); }
        memory.push_back(std::move(more));
    }
    return (int32_t *)ggml_backend_buffer_get_base(memory.back().get());
}

Context::Context(Store & store, Tier & tier, int n_expert_max) : store(store) {
    pinned.tier = &tier;
    pinned.slots.reserve(n_expert_max);
    event.slot_of.assign(n_expert_max, Event::not_chosen);
    event.experts.reserve(n_expert_max);
}

void Context::fail(moegguf_status status, const std::string & why) {
    if (failed()) { return; }
    failure.reason = {status, {}};
    snprintf(failure.reason.message, sizeof(failure.reason.message), "%s", why.c_str());
    failure.failed = true;
}

void Context::note_failures(const Shared & shared) {
    failure.read_errors = get(shared.counters.read_errors);
    const uint64_t given_up = shared.given_up;
    // A kernel has stopped waiting after a cancellation, and skipped matrices. So the pass fails, even if the
    // cancellation has been revoked since then.
    if (failure.given_up != given_up && !pinned.slots.empty()) { fail(MOEGGUF_CANCELLED, "cancelled"); }
    failure.given_up = given_up;
    const uint64_t lost_rows = shared.lost_rows;
    if (failure.lost_rows != lost_rows) { fail(shared.lost_rows_status, shared.error); }
    failure.lost_rows = lost_rows;
    for (const Pinned * layer : {&late, &pinned}) {
        for (int s : layer->slots) {
            if (layer->tier->residency.failed(s)) { fail(MOEGGUF_IO, shared.error); }
        }
    }
}

void Context::await_copies(Shared & shared, Lock & lock) {
    free_late(shared, lock);
    shared.wait(lock, [this] { return pinned.noted(); });
    pinned.ordered = 0;
    note_failures(shared);
}

void Context::free_late(Shared & shared, Lock & lock) {
    if (late.slots.empty()) { return; }
    shared.wait(lock, [this] { return late.noted(); });
    note_failures(shared);
    late.unpin();
}

void Context::set_aside(Shared & shared, Lock & lock) {
    if (!pinned.noted()) {
        free_late(shared, lock);
        late.tier = pinned.tier;
        late.ordered = pinned.ordered;
        late.slots.swap(pinned.slots);
    }
    pinned.ordered = 0;
    note_failures(shared);
}

// Collects the sequence and the phase of each token of the event. A layer may be computed for only those tokens of the
// pass whose logits are needed. Returns false if the tokens were not announced, or without a sequence for each token.
// Also returns false if the number of tokens found is not n_event_tokens.
bool Context::gather_tokens(int n_event_tokens) {
    if (pass.first_token < 0 || announced.sequences.empty()) { return false; }
    event.sequences.clear();
    event.phases.clear();
    for (int i = pass.first_token; i < pass.first_token + pass.n_tokens; i++) {
        if (n_event_tokens == pass.n_tokens || announced.outputs[i]) {
            event.sequences.push_back(announced.sequences[i]);
            event.phases.push_back(announced.phases[i]);
        }
    }
    return (int)event.sequences.size() == n_event_tokens;
}

bool Context::has_one_token_each() const {
    const int first = pass.first_token;
    bool found = first >= 0 && !announced.sequences.empty();
    for (int i = first; found && i < first + pass.n_tokens; i++) {
        found = announced.phases[i] == MOEGGUF_DECODE &&
                (i == first || announced.sequences[i] != announced.sequences[i - 1]);
    }
    return found;
}

} // namespace moegguf
