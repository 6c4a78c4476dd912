#include "transfers.h"

#include <algorithm>
#include <cmath>

namespace moegguf {
namespace {

constexpr int max_readers = 64;
constexpr size_t most_requests = 4096; // more than any link moves before they are stale

uint8_t lowest_bit(uint8_t bits) {
    return bits & -bits;
}

} // namespace

Transfers::Transfers(const Layout & layout, const moegguf_config & config, Shared & shared, Tier & ram)
    : layout_(layout),
      shared_(shared),
      ram_(ram) {
    if (config.n_readers < 1 || config.n_readers > max_readers) {
        throw Error(MOEGGUF_INVALID, "readers must be between 1 and " + std::to_string(max_readers) + ", not " +
                                         std::to_string(config.n_readers));
    }
    link_.bytes_per_ns = config.sim_bytes_per_ns;
    link_.latency_ns = config.sim_latency_ns;
    if (!shared.simulated()) {
        files_ = std::make_unique<Files>(layout, shared.has(MOEGGUF_DIRECT));
        start_readers(config);
    }
}

void Transfers::demand(const std::vector<int> & slots) {
    // Gate and up of all, then down of all: in the order they are multiplied with.
    for (const uint8_t kinds : {uint8_t(~down_kind), down_kind}) {
        for (int s : slots) {
            const Slot & slot = ram_.residency.slot(s);
            queue(s, layout_.layers[slot.il].chunks & kinds & ~ram_.residency.ready(s) & ~slot.reading, true);
        }
    }
    if (!demand_.empty()) {
        wake_readers(); // once: each wake-up is a system call
    }
    update_gauges();
}

bool Transfers::prefetch(int il, int expert) {
    if (requests_.size() >= most_requests) {
        return false;
    }
    requests_.push({il, expert});
    update_gauges();
    return true;
}

void Transfers::drop_prefetches(int il) {
    const size_t dropped = requests_.filter([&](const PrefetchRequest & request) { return request.il != il; });
    count(shared_.counters.prefetch_dropped, dropped);
    prefetch_.filter([&](const Job & job) {
        const int s = job.destination.slot;
        Slot & slot = ram_.residency.slot(s);
        if (!ram_.holds(job.destination) || slot.il != il || slot.pins > 0) {
            return true;
        }
        slot.queued &= ~job.kinds;
        if (slot.reading == 0 && slot.queued == 0 && !ram_.residency.complete(s)) {
            ram_.retire(s); // counted as wasted
        }
        return false;
    });
    update_gauges();
}

bool Transfers::idle() const {
    const bool filling =
        shared_.has(MOEGGUF_FILL) && ram_.numbering.resident() && error_.empty() && fill_next_ < (int)layout_.n_keys();
    return demand_.empty() && prefetch_.empty() && requests_.empty() && !reading() && !filling;
}

void Transfers::update_gauges() {
    set_gauge(shared_.counters.queue_needed, demand_.size());
    set_gauge(shared_.counters.queue_wanted, prefetch_.size() + requests_.size());
}

void Transfers::queue(int s, uint8_t kinds, bool demand) {
    Slot & slot = ram_.residency.slot(s);
    const bool whole = !demand && !shared_.has(MOEGGUF_CHUNKED);
    while (kinds) {
        const uint8_t bits = whole ? kinds : lowest_bit(kinds);
        (demand ? demand_ : prefetch_)
            .push({Place{TierId::disk}, ram_.place(s), slot.il, slot.expert, bits, demand, slot.claims});
        slot.queued |= bits;
        kinds &= ~bits;
    }
}

// The next transfer that is still of use.
bool Transfers::next_job(Job & job) {
    const bool had_any = !demand_.empty() || !prefetch_.empty() || !requests_.empty();
    const bool found = next_queued(job) || next_prefetch(job);
    if (had_any) {
        update_gauges();
    }
    if (!found && had_any) {
        shared_.done.notify_all(); // moegguf_store_drain waits for empty queues
    }
    return found || next_fill(job);
}

// Jobs whose slot changed hands or whose matrix came another way are passed over.
bool Transfers::next_queued(Job & job) {
    for (Ring<Job> * ring : {&demand_, &prefetch_}) {
        while (!ring->empty()) {
            job = ring->pop();
            const int s = job.destination.slot;
            const Slot & slot = ram_.residency.slot(s);
            if (!ram_.holds(job.destination)) {
                continue;
            }
            job.kinds &= slot.queued & ~ram_.residency.ready(s) & ~slot.reading;
            if (job.kinds && !ram_.residency.failed(s)) {
                return true;
            }
        }
    }
    return false;
}

bool Transfers::next_prefetch(Job & job) {
    while (!requests_.empty()) {
        const PrefetchRequest request = requests_.pop();
        if (start_prefetch(request.il, request.expert, job)) {
            ram_.residency.slot(job.destination.slot).prefetched = true;
            count(shared_.counters.prefetch_started);
            return true;
        }
        count(shared_.counters.prefetch_dropped);
    }
    return false;
}

// A pool with a slot for every expert reads those that were not asked for, too.
bool Transfers::next_fill(Job & job) {
    if (!shared_.has(MOEGGUF_FILL) || !ram_.numbering.resident() || !error_.empty()) {
        return false;
    }
    for (; fill_next_ < (int)layout_.n_keys(); fill_next_++) {
        const int il = fill_next_ / layout_.n_expert_max, expert = fill_next_ % layout_.n_expert_max;
        if (layout_.has_expert(il, expert) && start_prefetch(il, expert, job)) {
            return true;
        }
    }
    return false;
}

// A prefetch evicts only what has a lower score than itself.
bool Transfers::start_prefetch(int il, int expert, Job & job) {
    Residency & residency = ram_.residency;
    if (held_ || residency.find(il, expert) >= 0) {
        return false;
    }
    const float score = residency.ordered(now_) ? residency.score(il, expert, now_) : INFINITY;
    const int s = ram_.take_slot(il, expert, now_, score);
    if (s < 0) {
        return false;
    }
    queue(s, layout_.layers[il].chunks, false);
    wake_readers(); // for the matrices that this reader does not take
    job = prefetch_.pop();
    update_gauges();
    return true;
}

} // namespace moegguf
