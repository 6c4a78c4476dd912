#include "tier.h"

#include "clock.h"

namespace moegguf {
namespace {

int count_chunks(const Layout & layout) {
    int n = 0;
    for (const Matrix & m : layout.matrices) {
        n += m.n_expert;
    }
    return n;
}

} // namespace

Tier::Tier(TierId id, const Layout & layout, const moegguf_config & config, Shared & shared, Events & events)
    : id(id),
      numbering(layout, config.n_slots),
      residency(layout, numbering, shared.counters),
      layout_(layout),
      shared_(shared),
      events_(events),
      n_absent_chunks_(count_chunks(layout)) {
    if (!shared.simulated()) {
        pool_ = std::make_unique<Pool>(layout, numbering, config.device, shared.has(MOEGGUF_REPACK));
    }
}

int Tier::take_slot(int il, int expert, const Moment & now, const Bid & bid) {
    const int s = empty_slot(il, expert, now, bid);
    if (s >= 0) {
        residency.assign(s, il, expert);
    }
    return s;
}

int Tier::reserve_slot(int il, const Moment & now) {
    const int s = empty_slot(il, 0, now, {});
    if (s >= 0) {
        residency.reserve(s, il);
    }
    return s;
}

int Tier::empty_slot(int il, int expert, const Moment & now, const Bid & bid) {
    const int s = residency.choose(il, expert, now, bid);
    if (s >= 0 && residency.slot(s).il >= 0) {
        count(shared_.counters.evictions);
        release_slot(s);
    }
    return s;
}

void Tier::adopt(int s, int expert) {
    residency.adopt(s, expert);
    n_absent_chunks_ -= __builtin_popcount(residency.ready(s));
    report_residency(s, true);
}

void Tier::retire(int s) {
    if (residency.slot(s).reading) {
        return; // its reader retires it
    }
    release_slot(s);
    if (!usable(s) && pool_) {
        pool_->release(s, s + 1);
    }
}

void Tier::release_slot(int s) {
    if (residency.slot(s).prefetched) {
        count(shared_.counters.prefetch_wasted);
    }
    if (!residency.slot(s).streams()) {
        n_absent_chunks_ += __builtin_popcount(residency.ready(s));
        report_residency(s, false);
    }
    residency.vacate(s);
}

void Tier::publish(int s, uint8_t kinds) {
    residency.publish(s, kinds);
    n_absent_chunks_ -= __builtin_popcount(kinds);
}

void Tier::report_residency(int s, bool resident) {
    if (events_.on()) {
        const Slot & slot = residency.slot(s);
        events_.residency({now_ns(), slot.il, slot.expert, s, resident});
    }
}

void Tier::resize(int n_slots) {
    if (numbering.resident() && n_slots < residency.n_slots()) {
        numbering.share_all_slots();
        if (pool_) {
            pool_->share_all_slots(residency.n_slots());
        }
    }
    residency.set_usable(n_slots);
    for (int s = n_slots; s < residency.n_slots(); s++) {
        if (residency.slot(s).il >= 0 && residency.slot(s).pins == 0 && residency.slot(s).reading == 0) {
            count(shared_.counters.evictions);
            retire(s);
        }
    }
}

} // namespace moegguf
