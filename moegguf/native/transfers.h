// transfers.h: the queue of transfers, and the link from the files. The queue decides which bytes move next: first
// demands of layers, then experts that are worth having early. Copies bring bytes from RAM to a device (copies.h).
//
// A reader thread takes work under the store's lock: streamed reads, then demands, then prefetches. A prefetch gets its
// slot only then, and may evict. The reader moves the bytes without the lock. Under the lock again it publishes the
// matrix, settles the slot, and queues the copy to a device that waits for it. It may assign, fill and vacate slots of
// every tier.
#pragma once

#include "copies.h"
#include "drives.h"
#include "link.h"

namespace moegguf {

// The cause of a prefetch. Causes are served in this order.
enum class Cause : uint8_t { request, forecast, warm_start };

// An expert that is worth having. It is transferred only while no demand is queued, in place of one that is worth less.
// The eviction policy returns the worth of a request; a warm start takes free slots only.
struct Want {
    int il;
    int expert;
    Cause cause = Cause::request;
    float value = 0;                // worth of a forecast expert, as a chance
    uint64_t deadline = UINT64_MAX; // layer step (LayerStep) of the forecast use; from then on it is too late
};

// Reads that come before all others, in an order of their own (streamed_supply.cpp). Under the store's lock.
class StreamedReads {
  public:
    virtual ~StreamedReads() = default;
    virtual bool next_read(Job & job) = 0;     // takes the next matrix that has a slot
    virtual void arrived(const Job & job) = 0; // notes that the bytes of a matrix are there
};

class Transfers final : public Link {
  public:
    // n_readers: threads that will read, for each copy of the files. Throws Error(INVALID).
    Transfers(const Layout & layout, int n_readers, Shared & shared, const Tiers & tiers);

    // Is called before anything is computed. `streamed` may be destroyed only after stop().
    void set_streamed(StreamedReads & streamed) { streamed_ = &streamed; }
    void stop(); // the store, and the threads

    // Under the store's lock.
    // What layers need now, before all else: every matrix of slots of one layer that is not there or being read.
    // submits: the caller calls submit_own() of the tier's copies.
    void demand(Tier & tier, const std::vector<int> & slots, bool submits = false);
    void copy(Tier & to, int s, bool demand); // every matrix, from the slot that is its source
    // Adds an expert that is worth having early. Requests are served first, each cause in its order. Call
    // wake_readers() after the last one.
    void want(const Want & want);
    void forget(Cause cause); // drops prefetches of this cause that have no slot yet
    void wake_readers() { shared_.work.notify_all(); }
    void wake_idle_reader();      // wakes a reader for prefetches, unless a demand is being read
    void drop_prefetches(int il); // drops prefetches of this layer, except in pinned slots
    void pause_prefetch(bool on); // a context waits for slots: prefetches take none
    void pause_fill(bool on);     // something else needs the processor: free slots are not filled
    bool reading() const { return get(shared_.counters.chunks_reading) > 0; }
    bool idle() const;                                                        // nothing queued, read, or left to fill
    uint64_t n_wanted() const { return wants_[0].size() + wants_[1].size(); } // no warm starts. Any thread

    void set_step(const LayerStep & now);
    uint64_t step() const { return now_.number; } // number of the last routing event
    // Returns the share of an expert's transfer that fits into the time until `distance` layers from now are routed.
    float share_in_time(int distance) const;

    // Link.
    void start_threads() override;
    bool begin_next(Job & job) override;
    void finish(const Job & job, const std::string & why) override;

    // Any thread; nothing is read in a simulation.
    bool direct() const { return drives_ && drives_->direct(); }
    void drive_info(int index, moegguf_drive_info & info) const; // Throws Error(INVALID).
    uint64_t buffer_bytes() const { return buffers_.empty() ? 0 : buffers_.size() * buffers_[0]->size(); }

  private:
    static constexpr int n_causes = 3;

    Ring<Want> & wanted(Cause cause) { return wants_[(int)cause]; }
    bool next_wanted(Cause cause, Job & job);
    bool next_fill(Job & job);
    bool start_prefetch(const Want & want);
    Worth worth(const Want & want, const Residency & residency) const;
    bool filling() const { return !wants_[(int)Cause::warm_start].empty() || n_filled_ < n_to_fill_; }
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
    void run_reader(const ReadBuffer & buffer);
    void read(const Job & job, const ReadBuffer & buffer);

    const int n_readers_;
    int n_at_once_ = 1; // transfers
    StreamedReads * streamed_ = nullptr;
    Ring<Want> wants_[n_causes]; // prefetches that have no slot yet
    int n_demand_reading_ = 0;
    size_t n_filled_ = 0; // experts that were tried, first with the layers, then in RAM, where they have a slot each
    const size_t n_to_fill_;
    bool paused_ = false;
    bool fill_paused_ = false;
    LayerStep now_;      // the last routing event
    float chunk_ns_ = 0; // moving average of a transfer's time
    float layer_ns_ = 0; // moving average of the time between layers of a pass of one token, without stall
    uint64_t computed_ns_ = 0;
    std::vector<int32_t> looked_up_; // scratch
    std::vector<int> waiting_;       // scratch
    std::unique_ptr<Drives> drives_;
    std::vector<std::unique_ptr<ReadBuffer>> buffers_; // one per reader
    std::mutex upload_;                                // devices that are not host memory take one upload at a time
    std::vector<std::thread> threads_;
};

} // namespace moegguf
