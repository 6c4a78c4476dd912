// copies.cpp: implements copies.h: the thread that copies batches of matrices to a device.
#include "copies.h"

#include "clock.h"
#include "switches.h"
#include "threads.h"

#include <algorithm>
#include <tuple>

namespace moegguf {
namespace {

constexpr size_t most_ahead = 96; // largest number of prefetched matrices in one batch for a prompt's next layer
constexpr size_t few_ahead = 8;   // value that replaces most_ahead if Remedy::large_batches is off

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
    ggml_backend_synchronize(backend_.get()); // creates the backend's stream before two threads use it
    thread_ = start_thread("the thread that copies", [this] { run(); });
}

void Copies::stop() {
    {
        Lock lock(shared_.mutex);
        shared_.stopping = true;
    }
    work_.notify_all();
    if (thread_.joinable()) { thread_.join(); }
    if (backend_) { ggml_backend_synchronize(backend_.get()); } // waits for the compute thread's copies
}

void Copies::queue(int s, uint8_t kinds, bool demand) {
    const SlotRef source = to_.source_tier(s).ref(to_.source(s));
    for (; kinds; kinds &= kinds - 1) { push(to_, s, source, kinds & -kinds, demand); }
}

bool Copies::begin_next(Job & job) {
    if (idle()) { return false; }
    if (pop(demand_, job) || pop(prefetch_, job)) {
        begin(job);
        return true;
    }
    shared_.done.notify_all(); // wakes moegguf_store_drain, which waits for empty queues
    return false;
}

uint64_t Copies::link_bytes(const Job & job) const {
    return job.source.tier == TierId::ram ? Link::link_bytes(job) : 0;
}

void Copies::note_time(uint64_t ns) { count(to_.counters.copy_ns, ns); }

void Copies::finish(const Job & job, const std::string & why) {
    const int s = job.destination.slot;
    end(job, why); // end() is called first, so that every thread sees a copied matrix as ready or as submitted
    submitted_[s].fetch_and(uint8_t(~job.kinds), std::memory_order_release);
    to_.settle(s);
    shared_.done.notify_all();
}

uint8_t Copies::submitted(int s) const { return submitted_[s].load(std::memory_order_acquire); }

void Copies::order(ggml_backend_t stream) {
    std::lock_guard<std::mutex> lock(event_mutex_);
    if (n_in_flight_ > 0) {
        ggml_backend_event_wait(stream, event_.get());
        count(to_.counters.stream_waits);
    }
}

// The following functions submit copies: on the copy thread, or with Remedy::own_copies also on the compute thread.

void Copies::submit_own(Lock & lock) {
    if (!own_.jobs.empty()) { // the copy thread has not yet recorded the completion of this thread's previous batch
        if (!idle()) { wake(); }
        return;
    }
    for (Job job; pop(demand_, job);) {
        begin(job);
        own_.jobs.push_back(job);
    }
    if (own_.jobs.empty()) { return; }
    submit(own_, lock);
    own_submitted_ = true;
    wake();
}

void Copies::run() {
    Lock lock(shared_.mutex);
    while (!shared_.stopping) {
        if (own_submitted_) {
            complete(own_, lock);
            own_submitted_ = false;
        } else if (take_batch()) {
            submit(batch_, lock);
            complete(batch_, lock);
        } else {
            work_.wait(lock);
        }
    }
}

// Moves queued jobs into batch_. A batch contains all queued matrices that layers are waiting for, so that one copy can
// move neighbouring slots. If no layer is waiting, a batch contains one prefetched matrix, or for a staging tier up to
// most_ahead or few_ahead of them. These limits keep such a batch small, so that it does not delay a layer for long.
// Returns false if no queued job is still needed.
bool Copies::take_batch() {
    const size_t most = to_.id != TierId::staging ? 1 : is_on(Remedy::large_batches) ? most_ahead : few_ahead;
    std::vector<Job> & jobs = batch_.jobs;
    for (Job job; jobs.empty() || !demand_.empty() || (!jobs.back().demand && jobs.size() < most);) {
        if (!begin_next(job)) { break; }
        jobs.push_back(job);
    }
    return !jobs.empty();
}

// Puts the copies of a batch into the backend's stream, with the lock released. If the device has events, another
// stream can wait for the batch afterwards.
void Copies::submit(Batch & batch, Lock & lock) {
    lock.unlock();
    batch.start_ns = now_ns();
    batch.why.clear();
    try {
        std::lock_guard<std::mutex> one_at_a_time(submit_mutex_);
        copy(batch.jobs);
    } catch (const std::exception & e) { // also catches std::bad_alloc
        batch.why = e.what();
    }
    if (event_) {
        std::lock_guard<std::mutex> event_lock(event_mutex_);
        ggml_backend_event_record(event_.get(), backend_.get());
        n_in_flight_ += 1;
    }
    lock.lock();
    if (!event_ || !batch.why.empty()) { return; }
    for (const Job & job : batch.jobs) {
        submitted_[job.destination.slot].fetch_or(job.kinds, std::memory_order_release);
    }
    shared_.done.notify_all();
}

// Waits until the copies of a submitted batch have ended, with the lock released. Then finishes each job: its matrix
// becomes ready, or the failure is recorded if submitting the batch failed.
void Copies::complete(Batch & batch, Lock & lock) {
    lock.unlock();
    ggml_backend_synchronize(backend_.get());
    const uint64_t took_ns = now_ns() - batch.start_ns;
    count(shared_.counters.upload_ns, took_ns);
    count(to_.counters.copy_ns, took_ns);
    if (event_) {
        std::lock_guard<std::mutex> event_lock(event_mutex_);
        n_in_flight_ -= 1;
    }
    lock.lock();
    for (const Job & job : batch.jobs) { finish(job, batch.why); }
    batch.jobs.clear();
}

// Puts the copies of these jobs into the backend's stream. One copy moves several matrices if they lie one after
// another in both pools. They may be matrices of neighbouring slots or, if slots are packed, also the matrices of one
// slot.
void Copies::copy(std::vector<Job> & jobs) const {
    // Size limit of one copy. Some backends hold the length of a row in 32 bits.
    constexpr uint64_t most_bytes = 1 << 30;
    const Pool & to = *to_.pool();
    const auto place = [&](const Job & job) { return to.data(matrix_of(layout_, job), job.destination.slot); };
    const auto end = [&](const Job & job) { return to.end(matrix_of(layout_, job), job.destination.slot); };
    std::sort(jobs.begin(), jobs.end(), [&](const Job & a, const Job & b) {
        if (a.il == b.il && to.packed()) { return place(a) < place(b); }
        return std::tie(a.il, a.kinds, a.destination.slot) < std::tie(b.il, b.kinds, b.destination.slot);
    });
    for (size_t first = 0, next = 0; first < jobs.size(); first = next) {
        const Job & job = jobs[first];
        for (next = first + 1; next < jobs.size() && continues(jobs[next - 1], jobs[next]); next++) {
            if (uint64_t(end(jobs[next]) - place(job)) > most_bytes) { break; }
        }
        const uint64_t n = end(jobs[next - 1]) - place(job);
        const int matrix = matrix_of(layout_, job);
        const Pool & from = *tiers_.of(job.source, job.il).pool();
        if (job.source.tier == TierId::ram) {
            to.write_bytes(backend_.get(), matrix, job.destination.slot, n, from.data(matrix, job.source.slot));
        } else {
            to.copy_bytes(backend_.get(), matrix, job.destination.slot, n, from, job.source.slot);
        }
    }
}

// Returns true if one copy can move both jobs, because the second one's matrix is the next one in both pools. Returns
// false for interleaved matrices, and for slots of different sizes in the two pools.
bool Copies::continues(const Job & job, const Job & next) const {
    const int matrix = matrix_of(layout_, job);
    const Pool &from = *tiers_.of(job.source, job.il).pool(), &to = *to_.pool();
    if (next.il != job.il || next.source.tier != job.source.tier || to.repacked(matrix)) { return false; }
    const int n_slots = next.destination.slot - job.destination.slot;
    const uint8_t chunks = layout_.layers[job.il].chunks, later = chunks & ~(2 * job.kinds - 1);
    const uint8_t follower = !to.packed() ? job.kinds : later ? later & -later : chunks & -chunks;
    const bool same_slot = to.packed() && later;
    return from.packed() == to.packed() && next.kinds == follower && n_slots == (same_slot ? 0 : 1) &&
           next.source.slot - job.source.slot == n_slots && (same_slot || from.stride(matrix) == to.stride(matrix));
}

} // namespace moegguf
