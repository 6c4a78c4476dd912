// store_gate.cpp: what happens between a router's choice and the multiplication. Runs on compute threads.
#include "clock.h"
#include "store.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace moegguf {
namespace {

// From this many choices per expert on, a pass touches practically every expert (1 - e^-4 = 98 % of them).
constexpr int64_t sweep_choices_per_expert = 4;

// How long a lane waits for another one's layer to end before it calls the pool too small for both.
constexpr auto longest_pass = std::chrono::seconds(60);

} // namespace

void Store::announce_tokens(Lane & lane, const moegguf_tokens_event & event) {
    lane.sequence = event.sequence;
    lane.phase = event.phase;
    lane.next_token = 0;
    lane.n_announced = event.n_tokens;
    lane.il = Lane::between_passes;
    if (events_.on()) {
        events_.tokens(event);
    }
}

void Store::gate(Lane & lane, int il, int32_t * ids, int n_expert_used, int n_tokens, uint8_t wait_kinds,
                 const Routed & routed) {
    const uint64_t start = now_ns();
    const size_t n = (size_t)n_expert_used * n_tokens;
    if (forked()) { // a thread of the parent may hold the lock
        fail(lane, MOEGGUF_FORKED, il, -1, "the model was loaded in the parent process; load it again in this one");
        std::fill_n(ids, n, 0);
        return;
    }
    events_.keep_step();
    Lock lock(mutex_);
    lane.waited_ns = 0;
    begin_pass(lane, il, n_tokens);
    const bool known = il >= 0 && il < (int)layout_.layers.size() && layout_.layers[il].n_expert > 0;
    if (!known) {
        fail(lane, MOEGGUF_ROUTING, il, -1, "a layer without experts was routed");
    }
    const int64_t n_expert = known ? layout_.layers[il].n_expert : 1;
    now_ = {il, n_tokens > 1 && (int64_t)n >= sweep_choices_per_expert * n_expert, known && lane.n_tokens == 1};
    const bool placed = !lane.failed && collect(lane, il, ids, n) && pin_all(lane, now_, lock);
    if (placed) {
        residency_.count_use(il, ids, n_expert_used, n_tokens);
        request(lane);
        if (now_.sweep && (flags_ & MOEGGUF_SWEEP)) {
            sweep_ahead(il);
        }
    }
    if (events_.on()) {
        // Victims were chosen before the listener hears of this gate, so that its scores act from the next one on.
        // It may wait for room, and the listener may need the lock to make some.
        lock.unlock();
        events_.gate({lane.pass, start, lane.id, il, n_tokens, n_expert_used, lane.sequence, lane.phase,
                      lane.first_token, routed.n_embd, ids, routed.weights, routed.inputs});
        lock.lock();
    }
    if (placed) {
        wait_locked(lane, wait_kinds, lock);
    }
    const int first = known ? layout_.layers[il].first_slot : 0;
    for (size_t i = 0; i < n; i++) {
        ids[i] = lane.failed ? 0 : lane.slot_of[ids[i]] - first;
    }
    for (int expert : lane.distinct) {
        lane.slot_of[expert] = -1;
    }
    counters_.hook_ns += now_ns() - start - lane.waited_ns;
}

void Store::begin_pass(Lane & lane, int il, int n_tokens) {
    if (il <= lane.il) {
        lane.pass = ++counters_.passes;
        lane.n_tokens = n_tokens;
        counters_.tokens += n_tokens;
        lane.first_token = lane.next_token + n_tokens <= lane.n_announced ? lane.next_token : -1;
        lane.next_token += n_tokens;
    }
    lane.il = il;
    counters_.gates += 1;
    unpin(lane);
    if (resize_to_ > 0) {
        apply_resize();
    }
}

bool Store::collect(Lane & lane, int il, const int32_t * ids, size_t n) {
    const int n_expert = layout_.layers[il].n_expert;
    lane.distinct.clear();
    for (size_t i = 0; i < n; i++) {
        const int expert = ids[i];
        if (expert < 0 || expert >= n_expert) {
            fail(lane, MOEGGUF_ROUTING, il, expert,
                 "the router chose expert " + std::to_string(expert) + " of " + std::to_string(n_expert));
            return false;
        }
        if (lane.slot_of[expert] == -1) {
            lane.slot_of[expert] = -2; // seen, slot not known yet
            lane.distinct.push_back(expert);
        }
    }
    return true;
}

// Residents are pinned before any victim is chosen, so that no needed expert is evicted for another.
bool Store::pin_all(Lane & lane, Moment now, Lock & lock) {
    const int il = now.il;
    // Whoever waits for slots holds some already. Another lane that did the same could block both for good.
    while (short_of_slots_ && !cancel_) {
        done_.wait(lock);
    }
    for (int expert : lane.distinct) {
        const int s = residency_.find(il, expert);
        look_up(il, s);
        residency_.count_look_up(il, expert);
        if (s >= 0) {
            Slot & slot = residency_.slot(s);
            slot.pins += 1;
            slot.claims += 1;
            slot.failed = false; // for an earlier request: this one reads again
            residency_.touch(s);
            lane.pinned.push_back(s);
            lane.slot_of[expert] = s;
        }
    }
    if ((flags_ & MOEGGUF_PREEMPT) && !residency_.resident()) {
        drop_stale(il);
    }
    const uint64_t start = clock_ns();
    const bool done = pin_absent(lane, now, lock);
    if (short_of_slots_) {
        short_of_slots_ = false;
        done_.notify_all();
        count_stall(lane, start);
    }
    return done;
}

bool Store::pin_absent(Lane & lane, Moment now, Lock & lock) {
    const int il = now.il;
    const bool fits = (int)lane.distinct.size() <= residency_.n_usable();
    const auto deadline = std::chrono::steady_clock::now() + longest_pass;
    for (int expert : lane.distinct) {
        if (lane.slot_of[expert] >= 0) {
            continue;
        }
        int s = take_slot(il, expert, now, INFINITY);
        while (s < 0 && fits && wait_for_slot(deadline, lock)) {
            s = take_slot(il, expert, now, INFINITY);
        }
        if (s < 0) {
            fail(lane, cancel_ ? MOEGGUF_CANCELLED : MOEGGUF_SLOTS, il, expert,
                 "one pass needs " + std::to_string(lane.distinct.size()) + " experts of layer " + std::to_string(il) +
                     " at once, the pool has " + std::to_string(residency_.n_usable()) + " slots");
            return false;
        }
        residency_.slot(s).pins += 1;
        lane.pinned.push_back(s);
        lane.slot_of[expert] = s;
    }
    return true;
}

// False when no slot will become free: transfers end, and another lane lets go at its next gate, but nobody else.
bool Store::wait_for_slot(Deadline deadline, Lock & lock) {
    if ((flags_ & MOEGGUF_SIMULATE) && link_.busy) {
        sim_step();
        return true;
    }
    if (cancel_ || (n_lanes_ == 1 && counters_.chunks_reading == 0)) {
        return false;
    }
    short_of_slots_ = true;
    return done_.wait_until(lock, deadline) == std::cv_status::no_timeout;
}

void Store::look_up(int il, int s) {
    counters_.lookups += 1;
    if (s < 0) {
        counters_.misses += 1;
        return;
    }
    Slot & slot = residency_.slot(s);
    (slot.ready == layout_.layers[il].chunks ? counters_.hits_ready : counters_.hits_late) += 1;
    counters_.prefetch_useful += slot.prefetched;
    slot.prefetched = false;
}

int Store::take_slot(int il, int expert, Moment now, float min_worth) {
    const int s = residency_.choose(il, expert, now, min_worth);
    if (s < 0) {
        return -1;
    }
    if (residency_.slot(s).il >= 0) {
        counters_.evictions += 1;
        release_slot(s);
    }
    residency_.assign(s, il, expert);
    return s;
}

// Every needed matrix that is not there or being read goes to the front queue: gate and up of all, then down of all.
void Store::request(Lane & lane) {
    for (const uint8_t kinds : {uint8_t(all_kinds & ~down_kind), down_kind}) {
        for (int s : lane.pinned) {
            const Slot & slot = residency_.slot(s);
            const uint8_t chunks = layout_.layers[slot.il].chunks & kinds;
            queue(s, chunks & ~slot.ready & ~slot.reading, true);
        }
    }
    if (!needed_.empty()) {
        work_.notify_all(); // once: each wake-up is a system call
    }
}

void Store::drop_stale(int il) {
    counters_.prefetch_dropped += wishes_.filter([&](const Wish & wish) { return wish.il != il; });
    wanted_.filter([&](const Job & job) {
        Slot & slot = residency_.slot(job.slot);
        if (slot.generation != job.generation || slot.il != il || slot.pins > 0) {
            return true;
        }
        slot.queued &= ~job.kinds;
        if (slot.reading == 0 && slot.queued == 0 && slot.ready != layout_.layers[il].chunks) {
            retire(job.slot); // counted as wasted
        }
        return false;
    });
}

void Store::sweep_ahead(int il) {
    const int n_layer = (int)layout_.layers.size();
    int next = il + 1;
    while (next < n_layer && layout_.layers[next].n_expert == 0) {
        next++;
    }
    if (next == n_layer) {
        return;
    }
    int room = residency_.n_usable() - (int)layout_.layers[il].n_expert;
    for (int expert = 0; expert < layout_.layers[next].n_expert && room > 0; expert++, room--) {
        if (residency_.find(next, expert) < 0) {
            counters_.prefetch_requested += 1;
            wishes_.push({next, expert});
        }
    }
    work_.notify_all();
}

void Store::unpin(Lane & lane) {
    for (int s : lane.pinned) {
        Slot & slot = residency_.slot(s);
        slot.pins -= 1;
        if (slot.pins == 0 && slot.failed) {
            retire(s);
        } else if (slot.pins == 0 && s >= residency_.n_usable()) {
            counters_.evictions += 1;
            retire(s);
        }
    }
    lane.pinned.clear();
    if (n_lanes_ > 1) {
        done_.notify_all();
    }
}

// Empties a slot, and gives its memory back when the pool has shrunk below it.
void Store::retire(int s) {
    if (residency_.slot(s).reading) {
        return; // its reader retires it
    }
    release_slot(s);
    if (s >= residency_.n_usable() && pool_) {
        pool_->release(s, s + 1);
    }
}

void Store::release_slot(int s) {
    const Slot & slot = residency_.slot(s);
    counters_.prefetch_wasted += slot.prefetched;
    int chunks = 0;
    for (uint8_t bits = slot.ready; bits; bits &= bits - 1) {
        chunks += 1;
    }
    n_absent_chunks_ += chunks;
    announce(s, false);
    residency_.vacate(s);
}

void Store::apply_resize() {
    if (residency_.resident() && n_lanes_ > 1) {
        return; // a context that came meanwhile computes with slot ids of its layers' windows
    }
    const int n = resize_to_;
    resize_to_ = 0;
    if (residency_.resident() && n < residency_.n_slots()) {
        residency_.share_all_slots();
        for (Layer & layer : layout_.layers) {
            layer.first_slot = 0;
            layer.n_slots = residency_.n_slots();
        }
        if (pool_) {
            pool_->share_all_slots(residency_.n_slots());
        }
    }
    residency_.set_usable(n);
    for (int s = n; s < residency_.n_slots(); s++) {
        if (residency_.slot(s).il >= 0 && residency_.slot(s).pins == 0) {
            counters_.evictions += 1;
            retire(s);
        }
    }
}

bool Store::ready(const Lane & lane, uint8_t kinds) const {
    return std::all_of(lane.pinned.begin(), lane.pinned.end(), [&](int s) {
        const Slot & slot = residency_.slot(s);
        return slot.failed || (layout_.layers[slot.il].chunks & kinds & ~slot.ready) == 0;
    });
}

bool Store::pending(Lane & lane, uint8_t kinds) {
    if (forked()) {
        return false;
    }
    Lock lock(mutex_);
    return !lane.failed && !ready(lane, kinds);
}

void Store::wait(Lane & lane, uint8_t kinds) {
    if (forked()) {
        return;
    }
    Lock lock(mutex_);
    wait_locked(lane, kinds, lock);
}

void Store::wait_locked(Lane & lane, uint8_t kinds, Lock & lock) {
    const bool simulated = flags_ & MOEGGUF_SIMULATE;
    const uint64_t start = clock_ns();
    while (!ready(lane, kinds) && !cancel_ && !stopping_) {
        if (simulated) {
            sim_step();
        } else {
            done_.wait(lock);
        }
    }
    count_stall(lane, start);
    if (cancel_) {
        fail(lane, MOEGGUF_CANCELLED, lane.il, -1, "cancelled");
    }
    for (int s : lane.pinned) {
        const Slot & slot = residency_.slot(s);
        if (slot.failed) {
            fail(lane, MOEGGUF_IO, slot.il, slot.expert, read_error_);
        }
    }
}

uint64_t Store::clock_ns() const {
    return flags_ & MOEGGUF_SIMULATE ? link_.clock_ns : now_ns();
}

void Store::count_stall(Lane & lane, uint64_t since_ns) {
    const uint64_t stall_ns = clock_ns() - since_ns;
    counters_.stall_ns += stall_ns;
    lane.waited_ns += flags_ & MOEGGUF_SIMULATE ? 0 : stall_ns;
}

bool Store::idle_gate(int il) const {
    if (forked()) {
        return false;
    }
    Lock lock(mutex_);
    return residency_.resident() && n_absent_chunks_ == 0 && !events_.on() && !watched_ && resize_to_ == 0 &&
           !cancel_ && layout_.layers[il].n_expert > 0;
}

void Store::count_idle_gate(Lane & lane, int il, int n_expert_used) {
    Lock lock(mutex_);
    begin_pass(lane, il, 1);
    counters_.lookups += n_expert_used;
    counters_.hits_ready += n_expert_used;
}

void Store::fail(Lane & lane, moegguf_status status, int il, int expert, const std::string & why) {
    if (lane.failed) {
        return;
    }
    lane.failure = {status, 0, il, expert, {}};
    snprintf(lane.failure.message, sizeof(lane.failure.message), "%s", why.c_str());
    lane.failed = true;
}

} // namespace moegguf
