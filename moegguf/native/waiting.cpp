// waiting.cpp: whether a layer's matrices are there, and waiting until they are; by atomics where nothing is to be
// done.
#include "acquire.h"

#include <algorithm>

namespace moegguf {

// Every matrix in `kinds` of every pinned slot is there, and none failed.
bool Acquire::available(const Lane & lane, uint8_t kinds) const {
    return std::all_of(lane.pinned.begin(), lane.pinned.end(),
                       [&](int s) { return !missing(lane, s, kinds) && !tier_.residency.failed(s); });
}

// Every such matrix is there, or will not come.
bool Acquire::settled(const Lane & lane, uint8_t kinds) const {
    return std::all_of(lane.pinned.begin(), lane.pinned.end(),
                       [&](int s) { return !missing(lane, s, kinds) || tier_.residency.failed(s); });
}

uint8_t Acquire::missing(const Lane & lane, int s, uint8_t kinds) const {
    return layout_.layers[lane.il].chunks & kinds & ~tier_.residency.ready(s);
}

// A failure counts as pending, so that wait() is called and ends the pass.
bool Acquire::pending(const Lane & lane, uint8_t kinds) const {
    return !shared_.forked() && !lane.failed && !available(lane, kinds);
}

void Acquire::wait(Lane & lane, uint8_t kinds) {
    if (shared_.forked() || (available(lane, kinds) && !shared_.cancelled)) {
        return;
    }
    Lock lock(shared_.mutex);
    const uint64_t start = shared_.clock_ns();
    while (!settled(lane, kinds) && !shared_.cancelled && !shared_.stopping) {
        if (shared_.simulated()) {
            transfers_.step();
        } else {
            shared_.done.wait(lock);
        }
    }
    count_stall(lane, start);
    if (shared_.cancelled) {
        lane.fail(MOEGGUF_CANCELLED, lane.il, -1, "cancelled");
    }
    for (int s : lane.pinned) {
        if (tier_.residency.failed(s)) {
            const Slot & slot = tier_.residency.slot(s);
            lane.fail(MOEGGUF_IO, slot.il, slot.expert, transfers_.error());
        }
    }
}

void Acquire::count_stall(Lane & lane, uint64_t since_ns) {
    const uint64_t stall_ns = shared_.clock_ns() - since_ns;
    count(shared_.counters.stall_ns, stall_ns);
    lane.waited_ns += shared_.simulated() ? 0 : stall_ns;
}

// computing_ before resize_to_, which resize() does the other way round: one of the two sees the other. And resize_to_
// before the numbering, which apply_resize() changes first.
bool Acquire::idle(int il) {
    if (shared_.forked()) {
        return false;
    }
    if (!computing_) {
        computing_ = true;
    }
    return resize_to_ == 0 && tier_.numbering.resident() && tier_.complete() && !events_.on() && !watched_ &&
           !shared_.cancelled && layout_.has_experts(il);
}

void Acquire::count_idle(Lane & lane, int il, int n_expert_used) {
    count_pass(lane, il, 1);
    if (!lane.pinned.empty()) {
        Lock lock(shared_.mutex);
        unpin(lane);
    }
    count(shared_.counters.lookups, n_expert_used);
    count(shared_.counters.hits_ready, n_expert_used);
}

} // namespace moegguf
