#include "transfers.h"

#include "fault.h"
#include "short_slices.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <system_error>

namespace moegguf {
namespace {

constexpr int max_readers = 64;
constexpr size_t most_requests = 4096; // more than any link moves before they are stale
constexpr double longest_probe_s = 3600;

uint8_t lowest_bit(uint8_t bits) {
    return bits & -bits;
}

// Calls body(matrix) for every matrix in `kinds` of a layer.
template <typename Body>
void for_matrices(const Layout & layout, int il, uint8_t kinds, Body body) {
    for (; kinds; kinds &= kinds - 1) {
        body(layout.layers[il].matrix[__builtin_ctz(kinds)]);
    }
}

// From a slot of the same device that has all of it.
bool borrow_on_device(Tier & to, int s) {
    const Slot & slot = to.residency.slot(s);
    const int r = to.staged_for ? to.staged_for->residency.find(slot.il, slot.expert) : -1;
    if (r < 0 || !to.staged_for->residency.complete(r)) {
        return false;
    }
    to.borrow(s, *to.staged_for, r);
    return true;
}

// The slot that is filled from a slot below with an expert; -1: none.
int slot_above(const Tier & to, const Job & job) {
    const int s = to.residency.find(job.il, job.expert);
    return s >= 0 && to.source(s) == job.destination.slot && to.source_tier(s).id == TierId::lower ? s : -1;
}

} // namespace

Transfers::Transfers(const Layout & layout, const moegguf_config & config, Shared & shared, Tiers & tiers,
                     Streaming & streaming, const Admission & admission)
    : layout_(layout),
      shared_(shared),
      tiers_(tiers),
      streaming_(streaming),
      admission_(admission) {
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

void Transfers::demand(Tier & tier, const std::vector<int> & slots) {
    if (tier.below()) {
        find_sources(tier, slots);
    }
    for (const uint8_t kinds : order_of_use) {
        for (int s : slots) {
            const Slot & slot = tier.residency.slot(s);
            if (!slot.streams()) {
                queue(tier, s, layout_.layers[slot.il].chunks & kinds & ~tier.residency.ready(s) & ~slot.reading, true);
            }
        }
    }
    if (!demand_.empty()) {
        wake_readers(); // once: each wake-up is a system call
    }
    if (tier.copies) {
        tier.copies->wake();
    }
    update_gauges();
}

void Transfers::copy(Tier & to, int s, bool demand) {
    queue(to, s, layout_.layers[to.residency.slot(s).il].chunks, demand);
    to.copies->wake();
}

bool Transfers::prefetch(int il, int expert) {
    if (requests_.size() >= most_requests) {
        return false;
    }
    requests_.push({il, expert});
    update_gauges();
    return true;
}

void Transfers::set_wishes(const std::vector<Wish> & wishes) {
    count(shared_.counters.prefetch_requested, wishes.size());
    count(shared_.counters.prefetch_dropped, wishes_.size() - next_wish_);
    wishes_.assign(wishes.begin(), wishes.end());
    next_wish_ = 0;
    if (!wishes_.empty() && n_demand_reading_ == 0) {
        shared_.work.notify_one();
    }
    update_gauges();
}

void Transfers::set_moment(const Moment & now) {
    const uint64_t computed_ns = shared_.clock_ns() - get(shared_.counters.stall_ns);
    const bool next_of_pass = now.il > now_.il && now.turn - now_.turn == uint64_t(now.il - now_.il);
    if (next_of_pass && now.token && now_.token && computed_ns > computed_ns_) {
        fade_in(layer_ns_, float(computed_ns - computed_ns_));
    }
    computed_ns_ = computed_ns;
    now_ = now;
}

float Transfers::share_in_time(int distance) const {
    const int n_chunks = shared_.has(MOEGGUF_CHUNKED) ? __builtin_popcount(layout_.layers[now_.il].chunks) : 1;
    const int n_at_once = shared_.simulated() ? 1 : (int)staging_.size();
    const float expert_ns = chunk_ns_ * ((n_chunks + n_at_once - 1) / n_at_once);
    return expert_ns > 0.0f && layer_ns_ > 0.0f ? std::min(1.0f, distance * layer_ns_ / expert_ns) : 1.0f;
}

void Transfers::drop_prefetches(int il) {
    const size_t dropped = requests_.filter([&](const PrefetchRequest & request) { return request.il != il; });
    count(shared_.counters.prefetch_dropped, dropped);
    if (tiers_.of(il).below()) {
        drop_waiting(tiers_.of(il), il);
    }
    prefetch_.filter([&](const Job & job) {
        const int s = job.destination.slot;
        Tier & to = tier_of(job);
        Slot & slot = to.residency.slot(s);
        if (!to.holds(job.destination) || slot.il != il || slot.pins > 0) {
            return true;
        }
        slot.queued &= ~job.kinds;
        if (slot.reading == 0 && slot.queued == 0 && !to.residency.complete(s)) {
            to.retire(s); // counted as wasted
        }
        return false;
    });
    update_gauges();
}

void Transfers::drop_requests() {
    count(shared_.counters.prefetch_dropped, requests_.size());
    requests_.clear();
    update_gauges();
}

// Prefetches on their way through the tier below. What is being copied just now ends, and is retired then.
void Transfers::drop_waiting(Tier & to, int il) {
    to.copies->drop_prefetches(il);
    waiting_ = to.borrowers();
    for (int s : waiting_) {
        Slot & slot = to.residency.slot(s);
        if (slot.il == il && slot.pins == 0) {
            slot.queued = 0;
            to.retire(s);
        }
    }
}

void Transfers::hold_prefetches(bool on) {
    held_ = on;
    if (!on) {
        wake_readers();
    }
}

bool Transfers::idle() const {
    const bool queued = !demand_.empty() || !prefetch_.empty() || !requests_.empty() || next_wish_ < wishes_.size();
    bool copying = false;
    tiers_.for_copies([&](const Copies & copies) { copying = copying || !copies.idle(); });
    return !queued && !copying && !reading() && !filling();
}

bool Transfers::filling() const {
    const bool fills_below =
        tiers_.below && tiers_.below->numbering.resident() && fill_next_below_ < (int)layout_.n_keys();
    const bool fills = shared_.has(MOEGGUF_FILL) && (fills_compute() || fills_below);
    return shared_.error.empty() && (next_warm_ < warm_.size() || fills);
}

bool Transfers::fills_compute() const {
    const bool any = tiers_.any([](const Tier & tier) { return tier.numbering.resident(); });
    return any && fill_next_ < (int)layout_.n_keys();
}

void Transfers::update_gauges() {
    set_gauge(shared_.counters.queue_needed, demand_.size());
    set_gauge(shared_.counters.queue_wanted, prefetch_.size() + requests_.size() + wishes_.size() - next_wish_);
}

// From another tier where that has a slot with it, once the bytes are there; else from the file.
void Transfers::queue(Tier & to, int s, uint8_t kinds, bool demand) {
    const int r = to.source(s);
    if (r < 0) {
        queue_reads(to, s, kinds, demand);
        return;
    }
    Tier & from = to.source_tier(s);
    const uint8_t there = kinds & from.residency.ready(r);
    to.residency.slot(s).queued |= kinds;
    if (there) {
        to.copies->queue(s, there, demand);
    }
    queue_reads(from, r, kinds & ~there & ~from.residency.slot(r).reading, demand);
}

void Transfers::queue_reads(Tier & to, int s, uint8_t kinds, bool demand) {
    Slot & slot = to.residency.slot(s);
    const bool whole = !demand && !shared_.has(MOEGGUF_CHUNKED);
    while (kinds) {
        const uint8_t bits = whole ? kinds : lowest_bit(kinds);
        (demand ? demand_ : prefetch_)
            .push({Place{TierId::disk}, to.place(s), slot.il, slot.expert, bits, demand, slot.claims});
        slot.queued |= bits;
        kinds &= ~bits;
    }
}

// Where the experts that slots were taken for come from. What the tier below has is kept before any of it makes room.
void Transfers::find_sources(Tier & to, const std::vector<int> & slots) {
    missed_.clear();
    for (int s : slots) {
        if (look_up_source(to, s)) {
            missed_.push_back(to.residency.slot(s).expert);
        }
    }
    if (missed_.empty()) {
        return;
    }
    const int il = to.residency.slot(slots[0]).il; // of all: another lane's event may have come since this lane's
    to.below()->residency.on_routing(il, missed_.data(), (int)missed_.size(), 1);
    for (int expert : missed_) {
        const int s = to.residency.find(il, expert);
        if (to.source(s) < 0) {
            take_source(to, s, {});
        }
    }
}

// False where nothing is to be looked up: the expert is here, or on its way.
bool Transfers::look_up_source(Tier & to, int s) {
    const Slot & slot = to.residency.slot(s);
    int r = to.source(s);
    const bool looks_up = r < 0 && !slot.streams() && !to.residency.complete(s) && !slot.queued && !slot.reading;
    if (looks_up && borrow_on_device(to, s)) {
        return false;
    }
    if (looks_up) {
        Counters & counters = to.below()->counters;
        r = to.below()->residency.find(slot.il, slot.expert);
        count(counters.lookups);
        count(r < 0 ? counters.misses : to.below()->residency.complete(r) ? counters.hits_ready : counters.hits_late);
        to.below()->residency.count_look_up(slot.il, slot.expert);
        if (r >= 0) {
            to.borrow(s, r);
        }
    }
    if (r >= 0) {
        to.source_tier(s).residency.slot(r).claims += 1;
        to.source_tier(s).residency.set_failed(r, false); // of passes that have ended
    }
    return looks_up;
}

// No slot below: it comes straight from the file.
void Transfers::take_source(Tier & to, int s, const Bid & bid) {
    const Slot & slot = to.residency.slot(s);
    const int r = to.below()->take_slot(slot.il, slot.expert, now_, bid);
    if (r >= 0) {
        to.below()->residency.slot(r).claims += 1;
        to.borrow(s, r);
    }
}

// Those whose slots are filled from the tier below.
template <typename Body>
void Transfers::for_tiers_above(int il, Body body) {
    Tier & tier = tiers_.of(il);
    body(tier);
    if (tier.staging) {
        body(*tier.staging);
    }
}

// What has arrived below goes on to a slot that waits for it.
void Transfers::pass_on(Tier & to, const Job & job) {
    const int s = slot_above(to, job);
    if (s < 0) {
        return;
    }
    const Slot & slot = to.residency.slot(s);
    if (const uint8_t kinds = job.kinds & slot.queued & ~slot.reading) {
        to.copies->queue(s, kinds, slot.pins > 0);
        to.copies->wake();
    }
}

bool Transfers::awaits_file(const Tier & tier, int s, uint8_t kinds) const {
    const int r = tier.source(s);
    return kinds & ~tier.residency.ready(s) & ~(r >= 0 ? tier.source_tier(s).residency.ready(r) : 0);
}

void Transfers::demand_below(int s) {
    Tier & below = *tiers_.below;
    const Slot & slot = below.residency.slot(s);
    queue_reads(below, s, layout_.layers[slot.il].chunks & ~below.residency.ready(s) & ~slot.reading, true);
    update_gauges();
    wake_readers();
}

// The next transfer that is still of use.
bool Transfers::next_job(Job & job) {
    const bool had_any = !demand_.empty() || !prefetch_.empty() || !requests_.empty() || next_wish_ < wishes_.size();
    const bool demand_first = shared_.has(MOEGGUF_DEMAND_FIRST);
    const bool found = streaming_.next_read(job) || (demand_first && next_queued(demand_, job)) ||
                       next_speculative(job) || next_queued(demand_, job);
    if (had_any) {
        update_gauges();
    }
    if (!found && had_any) {
        shared_.done.notify_all(); // moegguf_store_drain waits for empty queues
    }
    return found || next_fill(job);
}

bool Transfers::next_speculative(Job & job) {
    return next_queued(prefetch_, job) || next_prefetch(job) || next_wish(job);
}

// Jobs whose slot changed hands or whose matrix came another way are passed over.
bool Transfers::next_queued(Ring<Job> & ring, Job & job) {
    while (!ring.empty()) {
        job = ring.pop();
        const int s = job.destination.slot;
        const Tier & to = tier_of(job);
        const Slot & slot = to.residency.slot(s);
        if (!to.holds(job.destination)) {
            continue;
        }
        job.kinds &= slot.queued & ~to.residency.ready(s) & ~slot.reading;
        if (job.kinds && !to.residency.failed(s)) {
            return true;
        }
    }
    return false;
}

bool Transfers::next_prefetch(Job & job) {
    while (!requests_.empty()) {
        const PrefetchRequest request = requests_.pop();
        const auto bid = [&](const Residency & residency) {
            return Bid{residency.ordered(now_) ? residency.score(request.il, request.expert, now_) : INFINITY};
        };
        if (!start_prefetch(request.il, request.expert, bid)) {
            count(shared_.counters.prefetch_dropped);
        } else if (next_queued(prefetch_, job)) {
            return true;
        }
    }
    return false;
}

// Only while nothing is read that a layer waits for, where that comes first. The policy's score has no say: an expert
// that is used makes room by it anyway once it is missed, so only the chance of that counts.
bool Transfers::next_wish(Job & job) {
    const bool allowed = n_demand_reading_ == 0 || !shared_.has(MOEGGUF_DEMAND_FIRST);
    while (allowed && next_wish_ < wishes_.size()) {
        const Wish wish = wishes_[next_wish_++];
        const auto bid = [&](const Residency &) { return Bid{INFINITY, wish.worth}; };
        if (wish.turn <= now_.turn || !start_prefetch(wish.il, wish.expert, bid)) {
            count(shared_.counters.prefetch_dropped);
        } else if (next_queued(prefetch_, job)) {
            return true;
        }
    }
    return false;
}

// What fills free slots while there is nothing else to do: what was asked for, each as near to the layers as there is
// space; then every expert, where a pool has a slot for each.
bool Transfers::next_fill(Job & job) {
    while (filling() && !held_) {
        if (next_warm_ < warm_.size()) {
            const PrefetchRequest next = warm_[next_warm_++];
            if (layout_.has_expert(next.il, next.expert)) {
                Tier & to = tiers_.of(next.il);
                fill(to, next.il, next.expert) || (to.below() && fill(*to.below(), next.il, next.expert));
            }
        } else {
            const bool compute = fills_compute();
            const int key = compute ? fill_next_++ : fill_next_below_++;
            const int il = key / layout_.n_expert_max;
            Tier & to = compute ? tiers_.of(il) : *tiers_.below;
            if (to.numbering.resident()) {
                fill(to, il, key % layout_.n_expert_max);
            }
        }
        if (next_queued(prefetch_, job)) {
            update_gauges();
            return true;
        }
    }
    return false;
}

// False where the tier has the expert, or no free slot. What the other tier has needs none in RAM.
bool Transfers::fill(Tier & to, int il, int expert) {
    const bool holds = layout_.has_expert(il, expert) && to.layers.has[il];
    if (!holds || to.residency.find(il, expert) >= 0 || !to.residency.has_free()) {
        return false;
    }
    const int s = to.take_slot(il, expert, now_);
    if (s < 0) {
        return false;
    }
    const int r = to.below() ? to.below()->residency.find(il, expert) : -1;
    if (r >= 0) {
        to.borrow(s, r);
    }
    queue(to, s, layout_.layers[il].chunks, false);
    wake_all(to);
    return true;
}

void Transfers::set_warm(const std::vector<PrefetchRequest> & experts) {
    warm_ = experts;
    next_warm_ = 0;
    wake_readers();
}

void Transfers::wake_all(const Tier & to) {
    wake_readers(); // for the matrices that this reader does not take
    if (to.copies) {
        to.copies->wake();
    }
    update_gauges();
}

// What nothing waits for yet evicts only what is worth less than its bid, in each tier.
template <typename BidIn>
bool Transfers::start_prefetch(int il, int expert, BidIn bid) {
    Tier & to = tiers_.of(il);
    const bool admitted = to.residency.has_free() || admission_.admits(il, expert);
    if (held_ || to.residency.find(il, expert) >= 0 || !admitted) {
        return false;
    }
    const int s = to.take_slot(il, expert, now_, bid(to.residency));
    if (s < 0) {
        return false;
    }
    if (Tier * below = to.below()) {
        const int r = below->residency.find(il, expert);
        r >= 0 ? to.borrow(s, r) : take_source(to, s, bid(below->residency));
    }
    to.residency.slot(s).prefetched = true;
    count(shared_.counters.prefetch_started);
    queue(to, s, layout_.layers[il].chunks, false);
    wake_all(to);
    return true;
}

// The transfers themselves: reader threads from file to slot, or steps of the modelled link.

void Transfers::start_readers(const moegguf_config & config) {
    uint64_t piece = 0;
    for (const Matrix & m : layout_.matrices) {
        piece = std::max(piece, std::min(m.expert_bytes, piece_bytes(m)));
    }
    for (int i = 0; i < config.n_readers; i++) {
        staging_.push_back(std::make_unique<Staging>(piece + Shard::alignment));
    }
    readers_.reserve(config.n_readers);
    try {
        for (int i = 0; i < config.n_readers; i++) {
            if (fault(MOEGGUF_FAULT_THREAD)) {
                throw std::system_error(errno, std::generic_category());
            }
            readers_.emplace_back([this, i] { run_reader(i); });
        }
    } catch (const std::exception & e) {
        if (readers_.empty()) {
            throw Error(MOEGGUF_MEMORY, std::string("cannot start a reader thread: ") + e.what());
        }
    }
}

Transfers::~Transfers() {
    {
        Lock lock(shared_.mutex);
        shared_.stopping = true;
    }
    shared_.work.notify_all();
    shared_.done.notify_all();
    for (std::thread & reader : readers_) {
        reader.join();
    }
}

uint64_t Transfers::staging_bytes() const {
    return staging_.empty() ? 0 : staging_.size() * staging_[0]->size();
}

void Transfers::begin(Job & job) {
    job.begun_ns = shared_.clock_ns();
    n_demand_reading_ += job.demand;
    tier_of(job).residency.begin_read(job.destination.slot, job.kinds);
    count(shared_.counters.chunks_reading);
}

void Transfers::run_reader(int index) {
    ask_for_short_slices();
    Lock lock(shared_.mutex);
    while (!shared_.stopping) {
        Job job;
        if (!next_job(job)) {
            shared_.work.wait(lock);
            continue;
        }
        begin(job);
        lock.unlock();

        ReadStats stats;
        uint64_t upload_ns = 0;
        std::string why;
        try {
            copy_from_disk(job, *staging_[index], stats, upload_ns);
        } catch (const std::exception & e) { // memory, too
            why = e.what();
        }
        count(shared_.counters.read_ns, stats.read_ns);
        count(shared_.counters.read_retries, stats.retries);
        count(shared_.counters.upload_ns, upload_ns);

        lock.lock();
        finish(job, why);
    }
}

void Transfers::copy_from_disk(const Job & job, const Staging & staging, ReadStats & stats, uint64_t & upload_ns) {
    for_matrices(layout_, job.il, job.kinds, [&](int matrix) {
        const Matrix & m = layout_.matrices[matrix];
        const uint64_t row_bytes = m.expert_bytes / m.ne1;
        const int64_t step = piece_bytes(m) / row_bytes;
        for (int64_t row = 0; row < m.ne1; row += step) {
            const int64_t n_rows = std::min(step, m.ne1 - row);
            const uint64_t offset = m.offset + job.expert * m.expert_bytes + row * row_bytes;
            const uint8_t * data = (*files_)[m.shard].read(offset, n_rows * row_bytes, staging, stats);
            const uint64_t start = now_ns();
            write(tier_of(job), matrix, job.destination.slot, row, n_rows, data);
            upload_ns += now_ns() - start;
        }
    });
}

void Transfers::write(const Tier & to, int matrix, int slot, int64_t row, int64_t n_rows, const uint8_t * data) {
    const Pool & pool = *to.pool();
    Lock one_at_a_time(upload_, std::defer_lock);
    if (!pool.host()) {
        one_at_a_time.lock();
    }
    pool.write(matrix, slot, row, n_rows, data);
}

uint64_t Transfers::bytes_of(const Job & job) const {
    uint64_t bytes = 0;
    for_matrices(layout_, job.il, job.kinds, [&](int matrix) { bytes += layout_.matrices[matrix].expert_bytes; });
    return bytes;
}

// A slot being read is never given away, so the job's generation still holds here.
void Transfers::finish(const Job & job, const std::string & why) {
    Counters & counters = shared_.counters;
    Tier & to = tier_of(job);
    const int s = job.destination.slot;
    uncount(counters.chunks_reading);
    count(counters.reads);
    n_demand_reading_ -= job.demand;
    if (n_demand_reading_ == 0 && next_wish_ < wishes_.size()) {
        wake_readers();
    }
    fade_in(chunk_ns_, float(shared_.clock_ns() - job.begun_ns));
    if (why.empty()) {
        const uint64_t bytes = bytes_of(job);
        to.count_arrival(job.demand, bytes);
        count(job.demand ? counters.bytes_missed : counters.bytes_prefetched, bytes);
    }
    if (why.empty() && job.streamed < 0) {
        to.publish(s, job.kinds);
    }
    to.residency.end_read(s, job.kinds);
    if (!why.empty()) {
        finish_failed(to, job, why);
    }
    to.tidy(s);
    if (why.empty() && job.streamed >= 0) {
        streaming_.arrived(job); // after which the slot may have its last expert, whole
    }
    if (why.empty() && job.destination.tier == TierId::lower) {
        for_tiers_above(job.il, [&](Tier & above) { pass_on(above, job); });
    }
    shared_.done.notify_all();
}

void Transfers::finish_failed(Tier & to, const Job & job, const std::string & why) {
    const int s = job.destination.slot;
    const Slot & slot = to.residency.slot(s);
    count(shared_.counters.read_errors);
    shared_.error = why;
    // A read from before the last routing event says nothing about that event's request: it gets one of its own.
    if (job.streamed < 0 && slot.pins > 0 && slot.claims != job.claims) {
        queue_reads(to, s, job.kinds, true);
        update_gauges();
        shared_.work.notify_one();
        return;
    }
    to.residency.set_failed(s, true);
    if (job.destination.tier == TierId::lower) {
        for_tiers_above(job.il, [&](Tier & above) { fail_above(above, job); });
    }
}

// It will not come there either.
void Transfers::fail_above(Tier & upper, const Job & job) {
    if (const int s = slot_above(upper, job); s >= 0) {
        upper.residency.set_failed(s, true);
        upper.tidy(s);
    }
}

// Simulation: the modelled links, one transfer at a time on each.

bool Transfers::start_idle_links() {
    bool started = false;
    Job job;
    if (!link_.busy && next_job(job)) {
        begin(job);
        link_.start(job, bytes_of(job), clock_ns_);
        started = true;
    }
    tiers_.for_copies([&](Copies & copies) {
        if (!copies.link.busy && copies.next(job)) {
            copies.start(job, bytes_of(job), clock_ns_);
            started = true;
        }
    });
    return started;
}

ModelledLink * Transfers::first_to_end() {
    ModelledLink * first = link_.busy ? &link_ : nullptr;
    tiers_.for_copies([&](Copies & copies) {
        if (copies.link.busy && (!first || copies.link.done_ns < first->done_ns)) {
            first = &copies.link;
        }
    });
    return first;
}

void Transfers::end_transfer(ModelledLink & link) {
    clock_ns_ = std::max(clock_ns_, link.done_ns);
    set_gauge(shared_.counters.sim_clock_ns, clock_ns_);
    link.busy = false;
    const Job job = link.job;
    &link == &link_ ? finish(job, {}) : tier_of(job).copies->finish(job, {});
}

void Transfers::step() {
    if (start_idle_links()) {
        return;
    }
    if (ModelledLink * link = first_to_end()) {
        end_transfer(*link);
    }
}

void Transfers::advance(uint64_t ns) {
    const uint64_t end = clock_ns_ + ns;
    while (true) {
        while (start_idle_links()) {
        }
        ModelledLink * link = first_to_end();
        if (!link || link->done_ns > end) {
            break;
        }
        end_transfer(*link);
    }
    clock_ns_ = end;
    set_gauge(shared_.counters.sim_clock_ns, end);
}

// Random experts through descriptors, block alignment and reader count as the readers use them.
double Transfers::probe(double seconds) const {
    if (!files_ || !(seconds > 0 && seconds <= longest_probe_s)) {
        throw Error(MOEGGUF_INVALID, "a probe reads the files of a store for some seconds");
    }
    std::atomic<uint64_t> bytes{0};
    std::atomic<bool> failed{false};
    const uint64_t start = now_ns(), end = start + uint64_t(seconds * 1e9);
    const auto read_random = [&](int i) {
        try {
            std::minstd_rand random(uint32_t(start) + i);
            Staging staging(staging_[i]->size());
            ReadStats stats;
            while (now_ns() < end) {
                const Matrix & m = layout_.matrices[random() % layout_.matrices.size()];
                const uint64_t n = std::min(m.expert_bytes, piece_bytes(m));
                (*files_)[m.shard].read(m.offset + random() % m.n_expert * m.expert_bytes, n, staging, stats);
                bytes += n;
            }
        } catch (const Error &) {
            failed = true;
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(readers_.size());
    try {
        for (size_t i = 0; i < readers_.size(); i++) {
            threads.emplace_back(read_random, (int)i);
        }
    } catch (const std::system_error &) {
        failed = true;
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    if (failed) {
        throw Error(MOEGGUF_IO, "the expert file could not be read");
    }
    return bytes * 1e9 / (now_ns() - start);
}

} // namespace moegguf
