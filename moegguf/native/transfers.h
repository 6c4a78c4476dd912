// transfers.h: the link from the model's files, and the decision which bytes move next. Other files call class
// Transfers the transfer queue. It has a queue of demands (reads that layers wait for), a queue of prefetches that have
// slots, and for each cause a queue of experts to prefetch (Want). Copies from RAM to a device belong to another link
// with its own queues (copies.h).
//
// A reader thread takes the next job under the store's lock. Streamed reads come first. With MOEGGUF_DEMAND_FIRST,
// demands come next, then prefetches. A prefetch gets its slot only when a reader takes it, and may evict another
// expert. A forecast that is too late by then is dropped. The thread reads the bytes without the lock. Then it takes
// the lock again, marks the matrix as ready, settles the slot, and queues copies for slots on a device that wait for
// the matrix. If a layer needs an expert whose prefetch is still queued, demands for its matrices are queued, and
// readers skip the older jobs.
//
// This class also finds the source of each slot that is filled through RAM, for demands and for prefetches. It borrows
// the slot that holds the expert, or assigns a slot in RAM to the expert and borrows this slot. So a prefetch usually
// occupies a slot on the device and one in RAM. If no slot in RAM can be assigned, the bytes are read directly into the
// device's slot. This class may assign, borrow, fill and vacate slots of every tier.
#pragma once

#include "copies.h"
#include "drives.h"
#include "link.h"

namespace moegguf {

// The cause of a prefetch. Causes are served in this order. request: moegguf_store_want(), or a layer that uses nearly
// all of its experts. forecast: the predictor. warm_start: experts that earlier runs used, which fill free slots after
// a load.
enum class Cause : uint8_t { request, forecast, warm_start };

// An expert to prefetch. A forecast evicts only an expert whose chance of use is below `value`. If the policy's scores
// decide, a request evicts only an expert with a lower score. A warm start uses only free slots.
struct Want {
    int il;
    int expert;
    Cause cause = Cause::request;
    // Forecast: the expected gain of the prefetch, compared with the victim's chance of use; INFINITY: scores decide as
    // for a request.
    float value = 0;
    // LayerStep::number of the layer for which the use is forecast; a prefetch at this step is too late.
    uint64_t deadline = UINT64_MAX;
};

// Reads of streamed experts, which come before all other reads (streamed_supply.cpp). Callers hold the store's lock.
class StreamedReads {
  public:
    virtual ~StreamedReads() = default;
    // Writes to `job` the next read for which a slot is free. Returns false if there is none.
    virtual bool next_read(Job & job) = 0;
    virtual void arrived(const Job & job) = 0; // called when a streamed matrix has been read into its slot
};

class Transfers final : public Link {
  public:
    // n_readers: number of reader threads for each copy of the files. Throws Error(INVALID) unless it is between 1 and
    // max_readers (transfers.cpp).
    Transfers(const Layout & layout, int n_readers, Shared & shared, const Tiers & tiers);

    // Must be called before the first pass. `streamed` may be destroyed only after stop().
    void set_streamed(StreamedReads & streamed) { streamed_ = &streamed; }
    void stop(); // sets the stop flag of the whole store, and joins the reader threads

    // Callers of the following functions hold the store's lock. Queues demands for every matrix of these slots that is
    // neither present nor under way. Slots of a stream are left out. `submits`: the caller itself will call
    // submit_own() of the tier's copies, so the copy thread is not woken.
    void demand(Tier & tier, const std::vector<int> & slots, bool submits = false);
    void copy(Tier & to, int s, bool demand); // queues transfers of all matrices of slot s from its source
    // Adds an expert to prefetch. Drops a request or forecast if the expert has a slot or does not exist, or if
    // most_wants are already waiting. Causes are served in the order of enum Cause. Experts of one cause are served in
    // the order in which they were added. Call wake_readers() after the last expert.
    void want(const Want & want);
    void forget(Cause cause); // drops prefetches of this cause that have no slot yet
    void wake_readers() { shared_.work.notify_all(); }
    void wake_idle_reader(); // wakes a reader thread if forecasts wait and no demand is being read
    // Drops the layer's requests and its queued prefetches, except those into pinned slots. Waiting forecasts stay.
    void drop_prefetches(int il);
    // While prefetches are paused, none of them gets a slot: a request or forecast is dropped when a reader takes it,
    // and free slots are not filled. Prefetches that already have slots are still read.
    void pause_prefetch(bool on);
    void pause_fill(bool on); // while on, free slots are not filled in the background
    bool reading() const { return get(shared_.counters.chunks_reading) > 0; }
    bool idle() const; // true: nothing is queued or under way, and the background fill has ended
    // number of waiting requests and forecasts; any thread may call this
    uint64_t n_wanted() const { return wants_[0].size() + wants_[1].size(); }

    void set_step(const LayerStep & now);
    uint64_t step() const { return now_.number; } // LayerStep::number of the last routing event
    // Returns the share (0 to 1) of an expert's transfer that can end before the layer `distance` layers ahead is
    // routed. Returns 1 until the time of a transfer and the time of a layer have been measured.
    float share_in_time(int distance) const;

    // Overrides of Link's functions.
    void start_threads() override;
    bool begin_next(Job & job) override;
    void finish(const Job & job, const std::string & why) override;

    // Any thread may call the following functions. direct() returns true if all copies in use are read with O_DIRECT;
    // false in a simulation, which reads no files.
    bool direct() const { return drives_ && drives_->direct(); }
    const Drives * drives() const { return drives_.get(); } // nullptr in a simulation
    // Throws Error(INVALID) if there is no such copy of the files.
    void drive_info(int index, moegguf_drive_info & info) const;

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
    void run_reader(const ReadBuffer & buffer);
    void read(const Job & job, const ReadBuffer & buffer);

    const int n_readers_;
    int n_at_once_ = 1; // maximum number of concurrent reads
    StreamedReads * streamed_ = nullptr;
    Ring<Want> wants_[n_causes]; // [cause] prefetches that have no slot yet
    int n_demand_reading_ = 0;
    // Number of experts that the background fill has tried: first every expert on devices, then every expert in RAM.
    size_t n_filled_ = 0;
    const size_t n_to_fill_;
    bool paused_ = false;
    bool fill_paused_ = false;
    LayerStep now_;      // step of the last routing event
    float chunk_ns_ = 0; // moving average of the time of one transfer in ns
    float layer_ns_ = 0; // moving average of the time per layer in ns, in passes of one token, without stalls
    uint64_t computed_ns_ = 0;
    std::vector<int32_t> looked_up_; // scratch
    std::vector<int> waiting_;       // scratch
    std::unique_ptr<Drives> drives_;
    std::vector<std::unique_ptr<ReadBuffer>> buffers_; // one for each reader thread
    std::mutex upload_; // held while a thread writes to memory that is not host memory: one thread at a time
    std::vector<std::thread> threads_;
};

} // namespace moegguf
