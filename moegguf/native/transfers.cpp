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

// llama.cpp multiplies with up (or with gate and up as one), then gate, then down: with one matrix of all experts of a
// layer before the next.
constexpr uint8_t order_of_use[] = {1 << MOEGGUF_UP | 1 << MOEGGUF_GATE_UP, 1 << MOEGGUF_GATE, down_kind};

uint8_t lowest_bit(uint8_t bits) {
    return bits & -bits;
}

// A moving average over some tens of values; 0: none yet.
void average(float & mean, uint64_t value) {
    mean += mean > 0.0f ? ((float)value - mean) / 32 : (float)value;
}

// Calls body(matrix) for every matrix in `kinds` of a layer.
template <typename Body>
void for_matrices(const Layout & layout, int il, uint8_t kinds, Body body) {
    for (; kinds; kinds &= kinds - 1) {
        body(layout.layers[il].matrix[__builtin_ctz(kinds)]);
    }
}

} // namespace

Transfers::Transfers(const Layout & layout, const moegguf_config & config, Shared & shared, Tier & tier)
    : layout_(layout),
      shared_(shared),
      tier_(tier) {
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
    for (const uint8_t kinds : order_of_use) {
        for (int s : slots) {
            const Slot & slot = tier_.residency.slot(s);
            queue(s, layout_.layers[slot.il].chunks & kinds & ~tier_.residency.ready(s) & ~slot.reading, true);
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
        average(layer_ns_, computed_ns - computed_ns_);
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
    prefetch_.filter([&](const Job & job) {
        const int s = job.destination.slot;
        Slot & slot = tier_.residency.slot(s);
        if (!tier_.holds(job.destination) || slot.il != il || slot.pins > 0) {
            return true;
        }
        slot.queued &= ~job.kinds;
        if (slot.reading == 0 && slot.queued == 0 && !tier_.residency.complete(s)) {
            tier_.retire(s); // counted as wasted
        }
        return false;
    });
    update_gauges();
}

bool Transfers::idle() const {
    const bool filling =
        shared_.has(MOEGGUF_FILL) && tier_.numbering.resident() && error_.empty() && fill_next_ < (int)layout_.n_keys();
    return demand_.empty() && prefetch_.empty() && requests_.empty() && next_wish_ == wishes_.size() && !reading() &&
           !filling;
}

void Transfers::update_gauges() {
    set_gauge(shared_.counters.queue_needed, demand_.size());
    set_gauge(shared_.counters.queue_wanted, prefetch_.size() + requests_.size() + wishes_.size() - next_wish_);
}

void Transfers::queue(int s, uint8_t kinds, bool demand) {
    Slot & slot = tier_.residency.slot(s);
    const bool whole = !demand && !shared_.has(MOEGGUF_CHUNKED);
    while (kinds) {
        const uint8_t bits = whole ? kinds : lowest_bit(kinds);
        (demand ? demand_ : prefetch_)
            .push({Place{TierId::disk}, tier_.place(s), slot.il, slot.expert, bits, demand, slot.claims});
        slot.queued |= bits;
        kinds &= ~bits;
    }
}

// The next transfer that is still of use.
bool Transfers::next_job(Job & job) {
    const bool had_any = !demand_.empty() || !prefetch_.empty() || !requests_.empty() || next_wish_ < wishes_.size();
    const bool found = next_queued(job) || next_prefetch(job) || next_wish(job);
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
            const Slot & slot = tier_.residency.slot(s);
            if (!tier_.holds(job.destination)) {
                continue;
            }
            job.kinds &= slot.queued & ~tier_.residency.ready(s) & ~slot.reading;
            if (job.kinds && !tier_.residency.failed(s)) {
                return true;
            }
        }
    }
    return false;
}

bool Transfers::next_prefetch(Job & job) {
    while (!requests_.empty()) {
        const PrefetchRequest request = requests_.pop();
        if (start_prefetch(request.il, request.expert, INFINITY, job)) {
            return true;
        }
        count(shared_.counters.prefetch_dropped);
    }
    return false;
}

// Only while nothing is read that a layer waits for.
bool Transfers::next_wish(Job & job) {
    while (n_demand_reading_ == 0 && next_wish_ < wishes_.size()) {
        const Wish wish = wishes_[next_wish_++];
        if (wish.turn > now_.turn && start_prefetch(wish.il, wish.expert, wish.worth, job)) {
            return true;
        }
        count(shared_.counters.prefetch_dropped);
    }
    return false;
}

// A pool with a slot for every expert reads those that were not asked for, too.
bool Transfers::next_fill(Job & job) {
    if (!shared_.has(MOEGGUF_FILL) || !tier_.numbering.resident() || !error_.empty()) {
        return false;
    }
    for (; fill_next_ < (int)layout_.n_keys(); fill_next_++) {
        const int il = fill_next_ / layout_.n_expert_max, expert = fill_next_ % layout_.n_expert_max;
        if (layout_.has_expert(il, expert) && take_slot(il, expert, INFINITY, job)) {
            return true;
        }
    }
    return false;
}

bool Transfers::start_prefetch(int il, int expert, float chance, Job & job) {
    if (!take_slot(il, expert, chance, job)) {
        return false;
    }
    tier_.residency.slot(job.destination.slot).prefetched = true;
    count(shared_.counters.prefetch_started);
    return true;
}

// What nothing waits for yet evicts only what has a lower score and a lower chance than itself.
bool Transfers::take_slot(int il, int expert, float chance, Job & job) {
    Residency & residency = tier_.residency;
    if (held_ || residency.find(il, expert) >= 0) {
        return false;
    }
    const float score = residency.ordered(now_) ? residency.score(il, expert, now_) : INFINITY;
    const int s = tier_.take_slot(il, expert, now_, {score, chance});
    if (s < 0) {
        return false;
    }
    queue(s, layout_.layers[il].chunks, false);
    wake_readers(); // for the matrices that this reader does not take
    job = prefetch_.pop();
    update_gauges();
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
    tier_.residency.begin_read(job.destination.slot, job.kinds);
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
            copy(job, *staging_[index], stats, upload_ns);
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

void Transfers::copy(const Job & job, const Staging & staging, ReadStats & stats, uint64_t & upload_ns) {
    switch (job.source.tier) {
        case TierId::disk:
            return copy_from_disk(job, staging, stats, upload_ns);
        case TierId::ram:
            throw Error(MOEGGUF_INVALID, "no tier takes experts from RAM yet");
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
            write(matrix, job.destination.slot, row, n_rows, data);
            upload_ns += now_ns() - start;
        }
    });
}

void Transfers::write(int matrix, int slot, int64_t row, int64_t n_rows, const uint8_t * data) {
    const Pool & pool = *tier_.pool();
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
    const int s = job.destination.slot;
    Slot & slot = tier_.residency.slot(s);
    uncount(counters.chunks_reading);
    count(counters.reads);
    n_demand_reading_ -= job.demand;
    if (n_demand_reading_ == 0 && next_wish_ < wishes_.size()) {
        wake_readers();
    }
    average(chunk_ns_, shared_.clock_ns() - job.begun_ns);
    if (why.empty()) {
        tier_.publish(s, job.kinds);
        count(job.demand ? counters.bytes_missed : counters.bytes_prefetched, bytes_of(job));
    }
    tier_.residency.end_read(s, job.kinds);
    if (!why.empty()) {
        finish_failed(job, why);
    }
    if (tier_.residency.complete(s)) {
        tier_.report_residency(s, true);
    } else if (slot.pins == 0 && slot.reading == 0 && (slot.queued == 0 || tier_.residency.failed(s))) {
        tier_.retire(s);
    }
    if (slot.il >= 0 && slot.pins == 0 && slot.reading == 0 && !tier_.usable(s)) {
        count(counters.evictions);
        tier_.retire(s);
    }
    shared_.done.notify_all();
}

void Transfers::finish_failed(const Job & job, const std::string & why) {
    const int s = job.destination.slot;
    const Slot & slot = tier_.residency.slot(s);
    count(shared_.counters.read_errors);
    error_ = why;
    // A read from before the last routing event says nothing about that event's request: it gets one of its own.
    if (slot.pins > 0 && slot.claims != job.claims) {
        queue(s, job.kinds, true);
        update_gauges();
        shared_.work.notify_one();
    } else {
        tier_.residency.set_failed(s, true);
    }
}

void Transfers::step() {
    if (!link_.busy) {
        Job job;
        if (next_job(job)) {
            begin(job);
            link_.start(job, bytes_of(job));
        }
        return;
    }
    link_.clock_ns = std::max(link_.clock_ns, link_.done_ns);
    set_gauge(shared_.counters.sim_clock_ns, link_.clock_ns);
    link_.busy = false;
    finish(link_.job, {});
}

void Transfers::advance(uint64_t ns) {
    const uint64_t end = link_.clock_ns + ns;
    while (true) {
        if (!link_.busy) {
            step();
        }
        if (!link_.busy || link_.done_ns > end) {
            break;
        }
        step();
    }
    link_.clock_ns = end;
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
