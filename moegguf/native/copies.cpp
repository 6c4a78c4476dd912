// copies.cpp: implements copies.h: the thread that copies batches of matrices to a device.
#include "copies.h"

#include "clock.h"
#include "threads.h"

#include <algorithm>
#include <tuple>

namespace moegguf {
namespace {

constexpr size_t most_ahead = 8; // matrices for a prompt's next layer that are copied as one

int matrix_of(const Layout & layout, const Job & job) { return layout.layers[job.il].matrix[__builtin_ctz(job.kinds)]; }

} // namespace

Copies::Copies(const Layout & layout, Shared & shared, const Tiers & tiers, Tier & to)
    : Link(layout, shared, tiers),
      to_(to),
      submitted_(to.residency.n_slots()) {}

void Copies::start_threads() {
    ggml_backend_dev_t device = to_.pool()->memory().device;
    backend_ = make_backend(device, 1);
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(device, &props);
    if (props.caps.async && props.caps.events) { event_.reset(ggml_backend_event_new(device)); }
    thread_ = start_thread("the thread that copies", [this] { run(); });
}

void Copies::stop() {
    {
        Lock lock(shared_.mutex);
        shared_.stopping = true;
    }
    work_.notify_all();
    if (thread_.joinable()) { thread_.join(); }
}

void Copies::queue(int s, uint8_t kinds, bool demand) {
    const SlotRef source = to_.source_tier(s).ref(to_.source(s));
    for (; kinds; kinds &= kinds - 1) { push(to_, s, source, kinds & -kinds, demand); }
}

void Copies::drop_prefetches(int il) {
    prefetch_.filter([&](const Job & job) {
        const Slot & slot = to_.residency.slot(job.destination.slot);
        return !to_.holds(job.destination) || slot.il != il || slot.pins > 0;
    });
}

bool Copies::begin_next(Job & job) {
    if (idle()) { return false; }
    if (pop(demand_, job) || pop(prefetch_, job)) {
        begin(job);
        return true;
    }
    shared_.done.notify_all(); // moegguf_store_drain waits for empty queues
    return false;
}

uint64_t Copies::link_bytes(const Job & job) const {
    return job.source.tier == TierId::ram ? Link::link_bytes(job) : 0;
}

void Copies::note_time(uint64_t ns) { count(to_.counters.copy_ns, ns); }

void Copies::finish(const Job & job, const std::string & why) {
    const int s = job.destination.slot;
    end(job, why); // published before it is no longer submitted: one of both is seen
    submitted_[s].fetch_and(uint8_t(~job.kinds), std::memory_order_release);
    to_.settle(s);
    shared_.done.notify_all();
}

uint8_t Copies::submitted(int s) const { return submitted_[s].load(std::memory_order_acquire); }

void Copies::order(ggml_backend_t stream) {
    std::lock_guard<std::mutex> lock(event_mutex_);
    if (in_flight_) {
        ggml_backend_event_wait(stream, event_.get());
        count(to_.counters.stream_waits);
    }
}

// The thread.

void Copies::run() {
    Lock lock(shared_.mutex);
    while (!shared_.stopping) {
        // Everything that layers wait for, so that neighbours can go as one; else one matrix, or some for a prompt, so
        // that a layer waits for no more.
        const size_t most = to_.staged_for ? most_ahead : 1;
        batch_.clear();
        for (Job job; batch_.empty() || !demand_.empty() || (!batch_.back().demand && batch_.size() < most);) {
            if (!begin_next(job)) { break; }
            batch_.push_back(job);
        }
        if (batch_.empty()) {
            work_.wait(lock);
            continue;
        }
        lock.unlock();
        const uint64_t start = now_ns();
        std::string why;
        try {
            submit_batch();
            mark_submitted(lock);
            ggml_backend_synchronize(backend_.get());
        } catch (const std::exception & e) { // memory, too
            why = e.what();
        }
        const uint64_t took_ns = now_ns() - start;
        count(shared_.counters.upload_ns, took_ns);
        count(to_.counters.copy_ns, took_ns);
        {
            std::lock_guard<std::mutex> event_lock(event_mutex_);
            in_flight_ = false;
        }
        lock.lock();
        for (const Job & job : batch_) { finish(job, why); }
    }
}

void Copies::submit_batch() {
    std::sort(batch_.begin(), batch_.end(), [](const Job & a, const Job & b) {
        return std::tie(a.il, a.kinds, a.destination.slot) < std::tie(b.il, b.kinds, b.destination.slot);
    });
    for (size_t first = 0; first < batch_.size();) {
        const Job & job = batch_[first];
        const int matrix = matrix_of(layout_, job), n = count_neighbours(first);
        const Pool &from = *tiers_.of(job.source, job.il).pool(), &to = *to_.pool();
        if (job.source.tier == TierId::ram) {
            to.write_slots(backend_.get(), matrix, job.destination.slot, n, from.data(matrix, job.source.slot));
        } else {
            to.copy_slots(backend_.get(), matrix, job.destination.slot, n, from, job.source.slot);
        }
        first += n;
    }
}

// From here on a stream can wait for the batch. `lock` is not held before or after.
void Copies::mark_submitted(Lock & lock) {
    if (!event_) { return; }
    {
        std::lock_guard<std::mutex> event_lock(event_mutex_);
        ggml_backend_event_record(event_.get(), backend_.get());
        in_flight_ = true;
    }
    lock.lock();
    for (const Job & job : batch_) { submitted_[job.destination.slot].fetch_or(job.kinds, std::memory_order_release); }
    shared_.done.notify_all();
    lock.unlock();
}

// Jobs from the first on whose slots lie side by side in both tiers.
int Copies::count_neighbours(size_t first) const {
    const Job & job = batch_[first];
    size_t n = 1;
    const auto follows = [&](const Job & next) {
        return next.il == job.il && next.kinds == job.kinds && next.source.tier == job.source.tier &&
               next.destination.slot == job.destination.slot + (int)n && next.source.slot == job.source.slot + (int)n;
    };
    while (!to_.pool()->repacked(matrix_of(layout_, job)) && first + n < batch_.size() && follows(batch_[first + n])) {
        n += 1;
    }
    return (int)n;
}

} // namespace moegguf
