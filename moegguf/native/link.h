// link.h: a link has queues of transfers into slots. The link chooses the next transfer, and updates the slot when the
// transfer has ended.
//
// In real time, a link's own threads carry out its transfers, or a compute thread does (Remedy::own_copies). In virtual
// time, the clock carries out one transfer of each link at a time (clock.h). The functions of this class queue
// transfers only into slots that are already assigned. Of the two kinds of links, only class Transfers also assigns
// slots (transfers.h).
//
// If a transfer fails, its slot is marked as failed, and is vacated once it has no pins. A pass that has pinned the
// slot fails with MOEGGUF_IO. A failed prefetch into a slot that no pass has pinned does not fail a pass.
//
// There is one exception: the slot is pinned, and a layer or a copy has requested the slot since the transfer was
// queued. The transfer is then queued again, and the slot is not marked as failed. Streamed matrices are never queued
// again.
#pragma once

#include "tier.h"

namespace moegguf {

// A first-in, first-out queue. It allocates nothing once it has grown to its working size.
template <typename T>
class Ring {
  public:
    bool empty() const { return size_ == 0; }
    size_t size() const { return get(size_); } // any thread may call this
    T & operator[](size_t i) { return items_[(head_ + i) & (items_.size() - 1)]; }

    T & add() { // appends an item without resetting its fields, and returns the item
        if (size_ == items_.size()) { grow(); }
        T & item = (*this)[size_];
        set_gauge(size_, size_ + 1);
        return item;
    }

    void push(const T & item) { add() = item; }

    T pop() {
        T item = items_[head_];
        head_ = (head_ + 1) & (items_.size() - 1);
        set_gauge(size_, size_ - 1);
        return item;
    }

    void clear() { set_gauge(size_, 0); }

    // Removes the items for which `keep` returns false, and keeps the order of the remaining items. Returns the number
    // of removed items.
    template <typename Keep>
    size_t filter(Keep keep) {
        size_t kept = 0;
        for (size_t i = 0; i < size_; i++) {
            if (keep((*this)[i])) { (*this)[kept++] = (*this)[i]; }
        }
        const size_t gone = size_ - kept;
        set_gauge(size_, kept);
        return gone;
    }

  private:
    void grow() {
        std::vector<T> larger(items_.empty() ? 256 : items_.size() * 2);
        for (size_t i = 0; i < size_; i++) { larger[i] = (*this)[i]; }
        items_.swap(larger);
        head_ = 0;
    }

    std::vector<T> items_; // the vector's size, which is the queue's capacity, is 0 or a power of two
    size_t head_ = 0;
    uint64_t size_ = 0;
};

// A link: queues of transfers into slots. Callers hold the store's lock, except for start_threads() and functions
// marked "any thread".
class Link {
  public:
    Link(const Layout & layout, Shared & shared, const Tiers & tiers)
        : layout_(layout),
          shared_(shared),
          tiers_(tiers) {}
    virtual ~Link() = default;
    Link(const Link &) = delete;
    Link & operator=(const Link &) = delete;

    // Starts the threads that carry out transfers. Callers do not hold the store's lock. Throws Error.
    virtual void start_threads() = 0;

    // Writes to `job` the next transfer that may begin now, and records that it has begun. Returns false if there is no
    // such transfer, even if others are still queued.
    virtual bool begin_next(Job & job) = 0;
    // Records the end of a transfer. `why`: the reason for a failure; empty: the transfer succeeded.
    virtual void finish(const Job & job, const std::string & why) = 0;
    // Only the virtual clock calls the following two functions. link_bytes() returns the number of bytes that go over
    // the link; 0: the transfer takes no time. note_time() is called when a transfer begins, with the transfer's
    // duration in ns.
    virtual uint64_t link_bytes(const Job & job) const { return job.bytes; }
    virtual void note_time(uint64_t) {}

    uint64_t n_queued(bool demand) const { return (demand ? demand_ : prefetch_).size(); } // any thread may call this

  protected:
    // Queues one transfer of the matrices `kinds` into slot s. `demand`: true if a layer is waiting for these matrices.
    // The fields are written one by one, because copying a whole Job takes several times as long.
    void push(Tier & to, int s, SlotRef source, uint8_t kinds, bool demand) {
        const Slot & slot = to.residency.slot(s);
        Job & job = (demand ? demand_ : prefetch_).add();
        job.source = source;
        job.destination = to.ref(s);
        job.il = slot.il;
        job.expert = slot.expert;
        job.kinds = kinds;
        job.demand = demand;
        job.requests = slot.requests;
        job.streamed = -1;
        to.residency.queue(s, kinds);
    }
    // Removes transfers from a queue, up to the first one that is still needed, and writes that transfer to `job`.
    // Returns false if the queue has no transfer that is still needed.
    bool pop(Ring<Job> & ring, Job & job) {
        job.kinds = 0;
        while (!job.kinds && !ring.empty()) {
            job = ring.pop();
            job.kinds = to(job).still_wanted(job);
        }
        return job.kinds;
    }
    void begin(Job & job) {
        job.bytes = layout_.bytes(job.il, job.kinds);
        job.begun_ns = shared_.clock->now_ns();
        to(job).residency.begin_read(job.destination.slot, job.kinds);
        count(shared_.counters.chunks_reading);
    }
    // Ends a transfer. After a success, marks its matrices as READY, unless they were streamed, and returns true. After
    // a failure, queues a new transfer and returns true if the matrices are not streamed, the slot is pinned, and it
    // was requested again since this transfer was queued. Otherwise marks the slot as failed, and returns false.
    //
    // A slot keeps its expert while a transfer is under way, so the job's generation is still valid.
    bool end(const Job & job, const std::string & why) {
        Tier & to = this->to(job);
        const int s = job.destination.slot;
        uncount(shared_.counters.chunks_reading);
        if (why.empty()) {
            count(job.demand ? to.counters.bytes_missed : to.counters.bytes_prefetched, job.bytes);
            if (job.streamed < 0) { to.residency.publish(s, job.kinds); }
        }
        to.residency.end_read(s, job.kinds);
        if (why.empty()) { return true; }
        count(shared_.counters.read_errors);
        shared_.error = why;
        const Slot & slot = to.residency.slot(s);
        // The slot was requested again after this transfer had been queued, so it gets another transfer.
        if (job.streamed < 0 && slot.pins > 0 && slot.requests != job.requests) {
            push(to, s, job.source, job.kinds, true);
            return true;
        }
        to.residency.fail(s);
        return false;
    }
    Tier & to(const Job & job) const { return tiers_.of(job.destination, job.il); }

    const Layout & layout_;
    Shared & shared_;
    const Tiers & tiers_;
    Ring<Job> demand_;   // transfers that layers wait for
    Ring<Job> prefetch_; // prefetches, and transfers that fill free slots
};

struct LinkSpeed {
    double bytes_per_ns = 0; // bandwidth; 0: transfers take no time
    double latency_ns = 0;   // latency of each transfer that takes time
};

} // namespace moegguf
