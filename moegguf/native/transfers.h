// transfers.h: which bytes go where next: the one queue of what layers need and of what is worth having early, and the
// link from the files. What RAM has goes to a device by copies (copies.h).
//
// It may take, fill and empty slots of every tier under the store's lock. It reads no file itself: readers do
// (readers.h).
#pragma once

#include "copies.h"
#include "link.h"
#include "readers.h"

namespace moegguf {

// Reads that come before all others, in an order of their own (streamed_supply.h). Under the store's lock.
class StreamedReads {
  public:
    virtual ~StreamedReads() = default;
    virtual bool next_read(Job & job) = 0;     // the next matrix that has a slot
    virtual void arrived(const Job & job) = 0; // its bytes are there
};

class Transfers final : public Link {
  public:
    // n_readers: threads that will carry them. Throws Error(INVALID).
    Transfers(const Layout & layout, int n_readers, Shared & shared, const Tiers & tiers);

    // Before anything is computed; streamed may be destroyed only after stop().
    void set_streamed(StreamedReads & streamed) { streamed_ = &streamed; }
    void stop() { readers_.reset(); } // the store is stopping

    // Under the store's lock.
    // What layers need now, before all else: every matrix of slots of one layer that is not there or being read.
    void demand(Tier & tier, const std::vector<int> & slots);
    void copy(Tier & to, int s, bool demand); // every matrix, from the slot that is its source
    // What is worth having early: each cause in the order given, requests first. wake_readers() when all is said.
    void want(const Want & want);
    void forget(Cause cause); // what was wanted for it and has no slot yet
    void wake_readers() { shared_.work.notify_all(); }
    void wake_idle_reader();       // for what is worth having, unless something is read that a layer waits for
    void drop_prefetches(int il);  // of this layer, in pinned slots excepted
    void hold_prefetches(bool on); // a context waits for slots: prefetches take none
    void hold_fill(bool on);       // something else needs the processor: what fills free slots waits
    bool reading() const { return get(shared_.counters.chunks_reading) > 0; }
    bool idle() const;                                                        // nothing queued, read, or left to fill
    uint64_t n_wanted() const { return wants_[0].size() + wants_[1].size(); } // no warm starts. Any thread

    void set_step(const LayerStep & now);
    uint64_t step() const { return now_.number; } // of the last routing event
    // How much of an expert's transfer fits into the time until `distance` layers from now are routed, at most 1.
    float share_in_time(int distance) const;

    // Link.
    void start_threads() override;
    bool begin_next(Job & job) override;
    void finish(const Job & job, const std::string & why) override;

    const Readers * readers() const { return readers_.get(); } // nullptr: nothing is read

  private:
    static constexpr int n_causes = 3;

    Ring<Want> & wanted(Cause cause) { return wants_[(int)cause]; }
    bool next_job(Job & job);
    bool next_wanted(Cause cause, Job & job);
    bool next_fill(Job & job);
    bool start_prefetch(const Want & want);
    Worth worth(const Want & want, const Residency & residency) const;
    bool filling() const;
    bool fills_compute() const;
    bool fill(Tier & to, int il, int expert);
    void wake_all(const Tier & to);
    void queue(Tier & to, int s, uint8_t kinds, bool demand);
    void queue_reads(Tier & to, int s, uint8_t kinds, bool demand);
    void find_sources(Tier & to, const std::vector<int> & slots);
    bool look_up_source(Tier & to, int s, LookUps & in_ram);
    void take_source(Tier & to, int s, const Worth & worth);
    template <typename Body>
    void for_slots_above(const Job & job, Body body);
    void drop_waiting(Tier & to, int il);

    const int n_readers_;
    int n_at_once_ = 1; // transfers
    StreamedReads * streamed_ = nullptr;
    Ring<Want> wants_[n_causes]; // that have no slot yet
    int n_demand_reading_ = 0;
    int fill_next_ = 0; // keys of experts that were tried, where a tier has a slot for each
    int fill_next_ram_ = 0;
    bool held_ = false;
    bool fill_held_ = false;
    LayerStep now_;      // the last routing event
    float chunk_ns_ = 0; // moving averages: of a transfer,
    float layer_ns_ = 0; // between layers of a pass of one token, without stall: while the link is free
    uint64_t computed_ns_ = 0;
    std::vector<int32_t> looked_up_; // scratch
    std::vector<int> waiting_;       // scratch
    std::unique_ptr<Readers> readers_;
};

} // namespace moegguf
