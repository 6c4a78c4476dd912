// lanes.cpp: contexts that come and go, their pins and failures, and a pool that changes its size between layers.
#include "acquire.h"

#include <cstdio>

namespace moegguf {

void Lane::fail(moegguf_status status, int il, int expert, const std::string & why) {
    if (failed) {
        return;
    }
    failure = {status, 0, il, expert, {}};
    snprintf(failure.message, sizeof(failure.message), "%s", why.c_str());
    failed = true;
}

std::unique_ptr<Lane> Acquire::open_lane() {
    Lock lock(shared_.mutex);
    auto lane = std::make_unique<Lane>(store_, lane_ids_, layout_.n_expert_max);
    lane_ids_ += 1;
    n_lanes_ += 1;
    return lane;
}

void Acquire::close_lane(Lane & lane) {
    Lock lock(shared_.mutex);
    unpin(lane);
    n_lanes_ -= 1;
    shared_.done.notify_all();
}

void Acquire::take_failure(Lane & lane, moegguf_failure & out, bool clear) {
    if (shared_.forked()) {
        out = lane.failure; // the lock may be held by a thread of the parent
        return;
    }
    Lock lock(shared_.mutex);
    out = lane.failed ? lane.failure : moegguf_failure{};
    if (clear) {
        lane.failure = {};
        lane.failed = false;
        lane.il = Lane::between_passes;
        unpin(lane);
    }
}

void Acquire::announce_tokens(Lane & lane, const moegguf_tokens_event & event) {
    lane.sequence = event.sequence;
    lane.phase = event.phase;
    lane.next_token = 0;
    lane.n_announced = event.n_tokens;
    lane.il = Lane::between_passes;
    if (events_.on()) {
        events_.tokens(event);
    }
}

void Acquire::unpin(Lane & lane) {
    for (int s : lane.pinned) {
        tier_.residency.unpin(s);
        if (tier_.residency.slot(s).pins > 0) {
            continue;
        }
        if (tier_.residency.failed(s)) {
            tier_.retire(s);
        } else if (!tier_.usable(s)) {
            count(shared_.counters.evictions);
            tier_.retire(s);
        }
    }
    lane.pinned.clear();
    if (n_lanes_ > 1) {
        shared_.done.notify_all();
    }
}

void Acquire::resize(int n_slots) {
    Lock lock(shared_.mutex);
    const int n_pool = tier_.residency.n_slots();
    if (n_slots < layout_.n_used_max || n_slots > n_pool) {
        throw Error(MOEGGUF_INVALID, "the pool can have " + std::to_string(layout_.n_used_max) + " to " +
                                         std::to_string(n_pool) + " slots, not " + std::to_string(n_slots));
    }
    if (tier_.numbering.resident() && n_lanes_ > 1) {
        throw Error(MOEGGUF_INVALID, "a fully resident pool with several contexts keeps its size");
    }
    resize_to_ = n_slots;
    if (!computing_) {
        apply_resize(); // later, only at a routing event is it certain that no layer is being computed
    }
}

void Acquire::apply_resize() {
    if (tier_.numbering.resident() && n_lanes_ > 1) {
        return; // a context that came meanwhile computes with slot ids of its layers' windows
    }
    tier_.resize(resize_to_);
    resize_to_ = 0; // after the numbering: idle() looks here first
}

} // namespace moegguf
