// transfers.cpp: implements transfers.h: the transfer queue and the reader threads.
#include "transfers.h"

#include "switches.h"
#include "threads.h"

#include <algorithm>
#include <cmath>

namespace moegguf {
namespace {

constexpr int max_readers = 64;
constexpr size_t most_wants = 4096; // maximum number of waiting requests, and of waiting forecasts

uint8_t lowest_bit(uint8_t bits) { return bits & -bits; }

// Returns true if any tier has a slot for each of its experts.
bool has_slot_each(const Tiers & tiers) {
    return tiers.any([](const Tier & tier) { return tier.numbering.resident(); }) ||
           (tiers.ram && tiers.ram->numbering.resident());
}

} // namespace

Transfers::Transfers(const Layout & layout, int n_readers, Shared & shared, const Tiers & tiers)
    : Link(layout, shared, tiers),
      n_readers_(n_readers),
      n_to_fill_(shared.has(MOEGGUF_FILL) && has_slot_each(tiers) ? 2 * layout.n_keys() : 0) {
    if (n_readers < 1 || n_readers > max_readers) {
        throw Error(MOEGGUF_INVALID, "readers must be between 1 and " + std::to_string(max_readers) + ", not " +
                                         std::to_string(n_readers));
    }
}

// Opens the files, allocates a read buffer for each reader thread, and starts these threads.
void Transfers::start_threads() {
    drives_ = std::make_unique<Drives>(layout_, shared_.has(MOEGGUF_DIRECT));
    n_at_once_ = std::min(max_readers, n_readers_ * (int)drives_->size());
    uint64_t piece = 0;
    for (const Matrix & m : layout_.matrices) { piece = std::max(piece, std::min(m.expert_bytes, piece_bytes(m))); }
    for (int i = 0; i < n_at_once_; i++) { buffers_.push_back(std::make_unique<ReadBuffer>(piece + Shard::alignment)); }
    threads_.reserve(n_at_once_);
    try {
        for (const auto & buffer : buffers_) {
            threads_.push_back(start_thread("a reader thread", [this, &buffer] { run_reader(*buffer); }));
        }
    } catch (const Error &) {
        if (threads_.empty()) { // one reader thread is enough; having none is an error
            throw;
        }
    }
}

void Transfers::stop() {
    {
        Lock lock(shared_.mutex);
        shared_.stopping = true;
    }
    shared_.work.notify_all();
    shared_.done.notify_all();
    for (std::thread & thread : threads_) { thread.join(); }
    threads_.clear();
}

void Transfers::drive_info(int index, moegguf_drive_info & info) const {
    const int n_drives = drives_ ? (int)drives_->size() : 0;
    if (index < 0 || index >= n_drives) {
        throw Error(MOEGGUF_INVALID, "the store reads " + std::to_string(n_drives) +
                                         " copies of the model's files, numbered from 0, and copy " +
                                         std::to_string(index) + " is not one of them");
    }
    drives_->describe(index, info);
}

void Transfers::run_reader(const ReadBuffer & buffer) {
    Lock lock(shared_.mutex);
    while (!shared_.stopping) {
        Job job;
        if (!begin_next(job)) {
            shared_.work.wait(lock);
            continue;
        }
        lock.unlock();

        std::string why;
        try {
            read(job, buffer);
        } catch (const std::exception & e) { // also catches std::bad_alloc
            why = e.what();
        }
        lock.lock();
        finish(job, why);
    }
}

void Transfers::read(const Job & job, const ReadBuffer & buffer) {
    Counters & counters = shared_.counters;
    const Pool & pool = *tiers_.of(job.destination, job.il).pool();
    for (uint8_t kinds = job.kinds; kinds; kinds &= kinds - 1) {
        const int matrix = layout_.layers[job.il].matrix[__builtin_ctz(kinds)];
        const Matrix & m = layout_.matrices[matrix];
        const uint64_t row_bytes = m.expert_bytes / m.ne1;
        const int64_t step = piece_bytes(m) / row_bytes;
        for (int64_t row = 0; row < m.ne1; row += step) {
            const int64_t n_rows = std::min(step, m.ne1 - row);
            const uint64_t offset = m.offset + job.expert * m.expert_bytes + row * row_bytes;
            const uint64_t start = now_ns();
            const uint8_t * data = drives_->read(m.shard, offset, n_rows * row_bytes, buffer, counters.read_retries);
            const uint64_t read = now_ns();
            Lock one_at_a_time(upload_, std::defer_lock);
            if (!pool.host()) { one_at_a_time.lock(); }
            pool.write(matrix, job.destination.slot, row, n_rows, data);
            count(counters.read_ns, read - start);
            count(counters.upload_ns, now_ns() - read);
        }
    }
}

// Functions for demands, which layers wait for.

void Transfers::demand(Tier & tier, const std::vector<int> & slots, bool submits) {
    if (tier.ram()) { find_sources(tier, slots); }
    for (const uint8_t kinds : order_of_use) {
        for (int s : slots) {
            const Slot & slot = tier.residency.slot(s);
            if (!slot.streams()) {
                queue(tier, s, layout_.layers[slot.il].chunks & kinds & ~tier.residency.ready(s) & ~slot.reading, true);
            }
        }
    }
    if (!demand_.empty()) {
        wake_readers(); // wakes the readers once for all slots, because each wake-up is a system call
    }
    if (tier.copies && !submits && !(is_on(Remedy::quiet_copies) && tier.copies->idle())) { tier.copies->wake(); }
}

void Transfers::copy(Tier & to, int s, bool demand) {
    queue(to, s, layout_.layers[to.residency.slot(s).il].chunks, demand);
    to.copies->wake();
}

// Queues transfers of matrices into slot s. If the slot has a source, matrices that are in the source are copied. All
// other matrices are read into the source first. Without a source, all matrices are read from the file into slot s.
void Transfers::queue(Tier & to, int s, uint8_t kinds, bool demand) {
    const int r = to.source(s);
    if (r < 0) {
        queue_reads(to, s, kinds, demand);
        return;
    }
    Tier & from = to.source_tier(s);
    const uint8_t there = kinds & from.residency.ready(r);
    to.residency.queue(s, kinds);
    if (there) { to.copies->queue(s, there, demand); }
    queue_reads(from, r, kinds & ~there & ~from.residency.slot(r).reading, demand);
}

void Transfers::queue_reads(Tier & to, int s, uint8_t kinds, bool demand) {
    const bool whole = !demand && !shared_.has(MOEGGUF_CHUNKED);
    while (kinds) {
        const uint8_t bits = whole ? kinds : lowest_bit(kinds);
        push(to, s, SlotRef{}, bits, demand);
        kinds &= ~bits;
    }
}

// Finds a source for each slot in `slots` that needs one, or tries to assign a slot in RAM as its source. All slots in
// `slots` belong to one layer. Their experts that are already in RAM are pinned before any other expert gets a slot
// there, so that they are not evicted for it.
void Transfers::find_sources(Tier & to, const std::vector<int> & slots) {
    LookUps in_ram(*to.ram());
    looked_up_.clear();
    for (int s : slots) {
        if (look_up_source(to, s, in_ram)) { looked_up_.push_back(to.residency.slot(s).expert); }
    }
    if (looked_up_.empty()) { return; }
    const int il = to.residency.slot(slots[0]).il; // layer of all slots
    to.ram()->residency.on_routing(il, looked_up_.data(), (int)looked_up_.size(), 1);
    for (int expert : looked_up_) {
        const int s = to.residency.find(il, expert);
        if (to.source(s) < 0) { take_source(to, s, {}); }
    }
}

// Looks for a slot on the same device or in RAM from which the expert of slot s can be copied. Returns true if the
// expert was looked up in RAM, whether or not it was found. Returns false if no look-up was needed. In that case, slot
// s is complete, belongs to a stream, or has a source or a transfer, or another slot on the device holds the expert.
bool Transfers::look_up_source(Tier & to, int s, LookUps & in_ram) {
    const Slot & slot = to.residency.slot(s);
    const bool looks_up =
        to.source(s) < 0 && !slot.streams() && !to.residency.complete(s) && !slot.queued && !slot.reading;
    Tier * slots = looks_up && to.id == TierId::staging ? &tiers_.of(slot.il) : nullptr;
    if (const int r = slots ? slots->residency.find(slot.il, slot.expert) : -1;
        r >= 0 && slots->residency.complete(r)) {
        to.borrow(s, *slots, r, false); // the source is a slot on the same device
        return false;
    }
    if (looks_up) {
        if (const int r = in_ram.find(slot.il, slot.expert); r >= 0) { to.borrow(s, *to.ram(), r, true); }
    }
    if (const int r = to.source(s); r >= 0) {
        to.source_tier(s).residency.request(r);
        to.source_tier(s).residency.clear_failed(r); // the failure belongs to a pass that has ended
    }
    return looks_up;
}

// Assigns a slot in RAM as the source of slot s. If no slot in RAM can be assigned, slot s is filled directly from the
// file.
void Transfers::take_source(Tier & to, int s, const Worth & worth) {
    const Slot & slot = to.residency.slot(s);
    const int r = to.ram()->assign(slot.il, slot.expert, now_, worth);
    if (r >= 0) {
        to.ram()->residency.request(r);
        to.borrow(s, *to.ram(), r, true);
    }
}

// Functions for prefetches.

void Transfers::want(const Want & want) {
    const bool counts = want.cause != Cause::warm_start;
    const bool coming =
        counts && (!layout_.has_expert(want.il, want.expert) || wanted(want.cause).size() >= most_wants ||
                   tiers_.of(want.il).residency.find(want.il, want.expert) >= 0);
    count(shared_.counters.prefetch_requested, counts);
    if (coming) {
        count(shared_.counters.prefetch_dropped);
        return;
    }
    wanted(want.cause).push(want);
}

void Transfers::wake_idle_reader() {
    if (n_demand_reading_ == 0 && !wanted(Cause::forecast).empty()) { shared_.work.notify_one(); }
}

void Transfers::forget(Cause cause) {
    count(shared_.counters.prefetch_dropped, cause == Cause::warm_start ? 0 : wanted(cause).size());
    wanted(cause).clear();
}

void Transfers::drop_prefetches(int il) {
    const size_t dropped = wanted(Cause::request).filter([&](const Want & want) { return want.il != il; });
    count(shared_.counters.prefetch_dropped, dropped);
    // Drops prefetches that wait for a copy from RAM. A link skips queued copies of matrices that are no longer needed
    // (Tier::still_wanted). A slot with a copy under way is vacated when the copy ends, unless its expert is then
    // complete.
    Tier & slots = tiers_.of(il);
    waiting_ = slots.borrowers();
    for (int s : waiting_) {
        const Slot & slot = slots.residency.slot(s);
        if (slot.il == il && slot.pins == 0) {
            slots.residency.drop(s, all_kinds);
            slots.vacate(s);
        }
    }
    prefetch_.filter([&](const Job & job) {
        const int s = job.destination.slot;
        Tier & to = tiers_.of(job.destination, job.il);
        const Slot & slot = to.residency.slot(s);
        if (!to.holds(job.destination) || slot.il != il || slot.pins > 0) { return true; }
        to.residency.drop(s, job.kinds);
        to.settle(s); // vacates the slot if no other matrix is queued or under way
        return false;
    });
}

void Transfers::pause_prefetch(bool on) {
    paused_ = on;
    if (!on) { wake_readers(); }
}

void Transfers::pause_fill(bool on) {
    fill_paused_ = on;
    if (!on) { wake_readers(); }
}

// Assigns a slot to a prefetch, and queues its transfers. A prefetch may evict only an expert that is worth less. This
// is checked in each tier separately. Returns false if the expert already has a slot, if no slot can be assigned, while
// prefetches are paused, or if kernels look up slots of the tier themselves.
bool Transfers::start_prefetch(const Want & want) {
    Tier & to = tiers_.of(want.il);
    if (paused_ || to.still || to.residency.find(want.il, want.expert) >= 0) { return false; }
    const int s = to.assign(want.il, want.expert, now_, worth(want, to.residency));
    if (s < 0) { return false; }
    if (Tier * ram = to.ram()) {
        const int r = ram->residency.find(want.il, want.expert);
        r >= 0 ? to.borrow(s, *ram, r, true) : take_source(to, s, worth(want, ram->residency));
    }
    to.residency.mark_prefetched(s);
    count(shared_.counters.prefetch_started);
    queue(to, s, layout_.layers[want.il].chunks, false);
    wake_all(to);
    return true;
}

// Returns the worth of a prefetch in one tier. For a forecast, it is want.value, which is compared with the victim's
// chance of use. The expert's score in the policy does not matter, because after a miss the expert would get a slot
// regardless of its score. For a request, or a forecast with an infinite value (waste_weight 0), only the score
// matters, if the policy orders by scores.
Worth Transfers::worth(const Want & want, const Residency & residency) const {
    if (want.cause == Cause::forecast && want.value < INFINITY) { return {INFINITY, want.value}; }
    return {residency.ordered(now_) ? residency.score(want.il, want.expert, now_) : INFINITY, INFINITY};
}

// Functions that take the next transfer from the queue.

bool Transfers::begin_next(Job & job) {
    // The order of transfers: streamed reads, demands, prefetches that have slots, requests, forecasts, and last the
    // experts that fill free slots. No forecast starts while a demand is being read. Without MOEGGUF_DEMAND_FIRST,
    // demands come after forecasts, and forecasts do not wait for demands.
    const bool demand_first = shared_.has(MOEGGUF_DEMAND_FIRST);
    const bool found = (streamed_ && streamed_->next_read(job)) || (demand_first && pop(demand_, job)) ||
                       pop(prefetch_, job) || next_wanted(Cause::request, job) ||
                       ((n_demand_reading_ == 0 || !demand_first) && next_wanted(Cause::forecast, job)) ||
                       pop(demand_, job) || next_fill(job);
    if (!found) {
        shared_.done.notify_all(); // wakes moegguf_store_drain, which waits for empty queues
        return false;
    }
    begin(job);
    n_demand_reading_ += job.demand;
    return true;
}

bool Transfers::next_wanted(Cause cause, Job & job) {
    while (!wanted(cause).empty()) {
        const Want want = wanted(cause).pop();
        if (want.deadline <= now_.number || !start_prefetch(want)) {
            count(shared_.counters.prefetch_dropped);
        } else if (pop(prefetch_, job)) {
            return true;
        }
    }
    return false;
}

// Takes the next expert for a free slot. Experts of the warm start come first. They get free slots of the compute tier,
// or else of RAM. With MOEGGUF_FILL, all experts of each tier that has a slot for every one of its experts come next.
// Returns false if no expert is left, or while filling is paused.
bool Transfers::next_fill(Job & job) {
    while (filling() && !paused_ && !fill_paused_) {
        if (Ring<Want> & warm = wanted(Cause::warm_start); !warm.empty()) {
            const Want next = warm.pop();
            if (layout_.has_expert(next.il, next.expert)) {
                Tier & to = tiers_.of(next.il);
                fill(to, next.il, next.expert) || (to.ram() && fill(*to.ram(), next.il, next.expert));
            }
        } else {
            const int key = int(n_filled_ % layout_.n_keys()), il = key / layout_.n_expert_max;
            Tier * to = n_filled_++ < layout_.n_keys() ? &tiers_.of(il) : tiers_.ram.get();
            if (to && to->numbering.resident()) { fill(*to, il, key % layout_.n_expert_max); }
        }
        if (pop(prefetch_, job)) { return true; }
    }
    return false;
}

// Assigns a free slot of a tier to an expert, and queues its transfers. If the tier in RAM has a slot for the expert,
// the expert is copied from there. Returns false if the tier already has the expert, cannot have it, or has no free
// slot.
bool Transfers::fill(Tier & to, int il, int expert) {
    const bool holds = layout_.has_expert(il, expert) && to.layers.has[il];
    if (!holds || to.residency.find(il, expert) >= 0 || !to.residency.has_free()) { return false; }
    const int s = to.assign(il, expert, now_);
    if (s < 0) { return false; }
    const int r = to.ram() ? to.ram()->residency.find(il, expert) : -1;
    if (r >= 0) { to.borrow(s, *to.ram(), r, true); }
    queue(to, s, layout_.layers[il].chunks, false);
    wake_all(to);
    return true;
}

void Transfers::wake_all(const Tier & to) {
    wake_readers(); // other readers take the expert's other matrices
    if (to.copies) { to.copies->wake(); }
}

bool Transfers::idle() const {
    const bool copying = std::any_of(tiers_.all.begin(), tiers_.all.end(),
                                     [](const Tier * to) { return to->copies && !to->copies->idle(); });
    return n_queued(true) + n_queued(false) + n_wanted() == 0 && !copying && !reading() && !filling();
}

// Functions that compare the speed of transfers with the speed of layers.

void Transfers::set_step(const LayerStep & now) {
    const uint64_t computed_ns = shared_.clock->now_ns() - get(shared_.counters.stall_ns);
    const bool next_of_pass = now.il > now_.il && now.number - now_.number == uint64_t(now.il - now_.il);
    if (next_of_pass && now.token && now_.token && computed_ns > computed_ns_) {
        update_ema(layer_ns_, float(computed_ns - computed_ns_));
    }
    computed_ns_ = computed_ns;
    now_ = now;
}

float Transfers::share_in_time(int distance) const {
    const int n_chunks = shared_.has(MOEGGUF_CHUNKED) ? __builtin_popcount(layout_.layers[now_.il].chunks) : 1;
    const float expert_ns = chunk_ns_ * ((n_chunks + n_at_once_ - 1) / n_at_once_);
    return expert_ns > 0.0f && layer_ns_ > 0.0f ? std::min(1.0f, distance * layer_ns_ / expert_ns) : 1.0f;
}

// Functions for the end of a transfer.

void Transfers::finish(const Job & job, const std::string & why) {
    Counters & counters = shared_.counters;
    Tier & to = this->to(job);
    const bool arrived = why.empty();
    count(counters.reads);
    n_demand_reading_ -= job.demand;
    if (n_demand_reading_ == 0 && !wanted(Cause::forecast).empty()) { wake_readers(); }
    update_ema(chunk_ns_, float(shared_.clock->now_ns() - job.begun_ns));
    if (arrived) { count(job.demand ? counters.bytes_missed : counters.bytes_prefetched, job.bytes); }
    if (!end(job, why)) {
        for_slots_above(job, [](Tier & above, int waiting) { // slots on a device that wait for these bytes fail, too
            above.residency.fail(waiting);
            above.settle(waiting);
        });
    }
    to.settle(job.destination.slot);
    if (arrived && job.streamed >= 0) {
        streamed_->arrived(job); // may end the stream in a simulation; the slot then holds the whole expert
    }
    if (arrived) { // bytes that are now in RAM are copied to slots on a device that wait for them
        for_slots_above(job, [&](Tier & above, int waiting) {
            const Slot & slot = above.residency.slot(waiting);
            if (const uint8_t kinds = job.kinds & slot.queued & ~slot.reading) {
                above.copies->queue(waiting, kinds, slot.pins > 0);
                above.copies->wake();
            }
        });
    }
    shared_.done.notify_all();
}

// Calls body(tier, slot) for each slot on a device whose source is the slot in RAM that this job fills.
template <typename Body>
void Transfers::for_slots_above(const Job & job, Body body) {
    if (job.destination.tier != TierId::ram) { return; }
    Tier & slots = tiers_.of(job.il);
    for (Tier * tier : {&slots, slots.staging}) {
        const int s = tier ? tier->residency.find(job.il, job.expert) : -1;
        if (s >= 0 && tier->source(s) == job.destination.slot && tier->source_tier(s).id == TierId::ram) {
            body(*tier, s);
        }
    }
}

} // namespace moegguf
