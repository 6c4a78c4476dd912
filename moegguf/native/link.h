// link.h: a link into slots: its queue of transfers, which of them comes next, and what follows when one has ended.
//
// A clock carries its transfers (clock.h): in real time by the link's own threads, in virtual time one after another.
// It fills slots that were taken for its transfers, and takes none.
#pragma once

#include "tier.h"

namespace moegguf {

// All of it under the store's lock, except what says "any thread".
class Link {
  public:
    Link(const Layout & layout, Shared & shared, const Tiers & tiers)
        : layout_(layout),
          shared_(shared),
          tiers_(tiers) {}
    virtual ~Link() = default;
    Link(const Link &) = delete;
    Link & operator=(const Link &) = delete;

    virtual void start_threads() = 0; // which carry transfers from now on. Throws Error. Without the lock.

    virtual bool begin_next(Job & job) = 0; // the next transfer that is still of use; false: there is none
    virtual void finish(const Job & job, const std::string & why) = 0; // why it failed; empty: the bytes are there
    // Virtual time: what goes over the link, 0 where that takes no time; and how long it will take.
    virtual uint64_t link_bytes(const Job & job) const { return job.bytes; }
    virtual void note_time(uint64_t) {}

    uint64_t n_queued(bool demand) const { return (demand ? demand_ : prefetch_).size(); } // any thread

  protected:
    // Matrices of a slot, in one transfer. demand: a layer needs them.
    void push(Tier & to, int s, SlotRef source, uint8_t kinds, bool demand);
    // The next that is still of use; false: there is none.
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
    // Its matrices are there; or it comes again, where a later routing event asked for the slot; or its slot has
    // failed, and false is returned.
    bool end(const Job & job, const std::string & why);
    Tier & to(const Job & job) const { return tiers_.of(job.destination, job.il); }

    const Layout & layout_;
    Shared & shared_;
    const Tiers & tiers_;
    Ring<Job> demand_; // what layers need
    Ring<Job> prefetch_;
};

struct LinkSpeed {
    double bytes_per_ns = 0; // 0: transfers are free
    double latency_ns = 0;   // of each
};

} // namespace moegguf
