#include "context.h"

#include "copies.h"

#include <cstdio>

namespace moegguf {

const int32_t * Event::begin(const Choice & choice, int n_expert) {
    for (int expert : experts) { // of the event before, also where memory did not suffice for it
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

uint8_t Pinned::missing(int s, uint8_t kinds) const {
    if (tier->residency.slot(s).streams()) {
        return 0; // readers know what comes there
    }
    const uint8_t submitted = stream ? tier->copies->submitted(s) : 0; // before they are ready: no gap between both
    return chunks & kinds & ~submitted & ~tier->residency.ready(s);
}

Context::Context(Store & store, Tier & tier, int n_expert_max) : store(store) {
    pinned.tier = &tier;
    pinned.slots.reserve(n_expert_max);
    event.slot_of.assign(n_expert_max, Event::not_chosen);
    event.experts.reserve(n_expert_max);
}

void Context::fail(moegguf_status status, int il, int expert, const std::string & why) {
    if (failed()) { return; }
    failure.reason = {status, 0, il, expert, {}};
    snprintf(failure.reason.message, sizeof(failure.reason.message), "%s", why.c_str());
    failure.failed = true;
}

void Context::note_failures(const Shared & shared) {
    failure.read_errors = get(shared.counters.read_errors);
    const uint64_t given_up = shared.given_up;
    if (failure.given_up != given_up && !pinned.slots.empty()) { // also when it was allowed again since
        fail(MOEGGUF_CANCELLED, pass.il, -1, "cancelled");
    }
    failure.given_up = given_up;
    for (int s : pinned.slots) {
        if (pinned.tier->residency.failed(s)) {
            const Slot & slot = pinned.tier->residency.slot(s);
            fail(MOEGGUF_IO, slot.il, slot.expert, shared.error);
        }
    }
}

// The last layer may be computed for fewer tokens than the pass has: those whose logits are wanted.
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
