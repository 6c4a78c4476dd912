// transfers.h: the queue of transfers, and the link from the model's files. The queue decides which bytes move next:
// reads that layers wait for (demands), and prefetches. Copies from RAM to a device are another link (copies.h).
//
// A reader thread takes the next job under the store's lock. Streamed reads come first, then demands and prefetches. A
// prefetch gets its slot only now, and may evict another expert. The thread reads the bytes without the lock. Then,
// under the lock again, it marks the matrix as there, settles the slot, and queues the copy to a device that waits for
// it. This class may assign, fill and vacate slots of every tier.
#pragma once

#include "copies.h"
#include "drives.h"
#include "link.h"

namespace moegguf {

// The cause of a prefetch. Causes are served in this order.
enum class Cause : uint8_t { request, forecast, warm_start };

// An expert to prefetch. A prefetch evicts only an expert that is worth less. The eviction policy computes the worth of
// a requested expert. A warm start takes only free slots.
struct Want {
    int il;
    int expert;
    Cause cause = Cause::request;
    float value = 0;                // worth of a forecast expert, on the scale of a chance of use
    uint64_t deadline = UINT64_MAX; // LayerStep::number of the forecast use; then it is too late
};

// Reads of streamed experts, which come before all other reads (streamed_supply.cpp). Callers hold the store's lock.
class StreamedReads {
  public:
    virtual ~StreamedReads() = default;
    virtual bool next_read(Job & job) = 0;     // takes the next matrix with a free slot; false: none
    virtual void arrived(const Job & job) = 0; // notes that the bytes of a matrix are there
};

class Transfers final : public Link {
  public:
    // n_readers: number of reader threads for each copy of the files. Throws Error(INVALID).
    Transfers(const Layout & layout, int n_readers, Shared & shared, const Tiers & tiers);

    // Must be called before anything is computed. `streamed` may be destroyed only after stop().
    void set_streamed(StreamedReads & streamed) { streamed_ = &streamed; }
    void stop(); // sets the stop flag of the whole store, and joins the reader threads

    // Callers of the next functions hold the store's lock. Queues every matrix of these slots that is neither there nor
    // being read, because a layer waits for them. submits: the caller will call submit_own() of the tier's copies.
    void demand(Tier & tier, const std::vector<int> & slots, bool submits = false);
    void copy(Tier & to, int s, bool demand); // queues every matrix, from the slot's source
    // Adds an expert to prefetch. Causes are served in the order of enum Cause, experts of one cause first in, first
    // out. Call wake_readers() after the last expert.
    void want(const Want & want);
    void forget(Cause cause); // drops prefetches of this cause that have no slot yet
    void wake_readers() { shared_.work.notify_all(); }
    void wake_idle_reader();      // wakes a reader for forecasts, unless a demand is being read
    void drop_prefetches(int il); // drops prefetches of this layer, except into pinned slots
    void pause_prefetch(bool on); // while on, prefetches take no slots, because a context waits for some
    void pause_fill(bool on);     // while on, free slots are not filled in the background
    bool reading() const { return get(shared_.counters.chunks_reading) > 0; }
    bool idle() const; // nothing is queued, read, or left to fill
    uint64_t n_wanted() const { return wants_[0].size() + wants_[1].size(); } // requests and forecasts; any thread

    void set_step(const LayerStep & now);
    uint64_t step() const { return now_.number; } // LayerStep::number of the last routing event
    // Returns the share (0 to 1) of an expert's transfer that fits into the time until the layer `distance` layers
    // ahead is routed.
    float share_in_time(int distance) const;

    // Overridden functions of Link.
    void start_threads() override;
    bool begin_next(Job & job) override;
    void finish(const Job & job, const std::string & why) override;

    // Any thread may call the next functions. In a simulation, nothing is read.
    bool direct() const { return drives_ && drives_->direct(); }
    void drive_info(int index, moegguf_drive_info & info) const; // Throws Error(INVALID) if there is no such drive.
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
    int n_at_once_ = 1; // number of transfers at the same time
    StreamedReads * streamed_ = nullptr;
    Ring<Want> wants_[n_causes]; // prefetches that have no slot yet
    int n_demand_reading_ = 0;
    size_t n_filled_ = 0; // experts that the background fill has tried: first on devices, then in RAM
    const size_t n_to_fill_;
    bool paused_ = false;
    bool fill_paused_ = false;
    LayerStep now_;      // layer step of the last routing event
    float chunk_ns_ = 0; // moving average of the time of a transfer
    float layer_ns_ = 0; // moving average of the time per layer in passes of one token, without stalls
    uint64_t computed_ns_ = 0;
    std::vector<int32_t> looked_up_; // scratch
    std::vector<int> waiting_;       // scratch
    std::unique_ptr<Drives> drives_;
    std::vector<std::unique_ptr<ReadBuffer>> buffers_; // one for each reader thread
    std::mutex upload_; // lets one thread at a time write to memory that is not host memory
    std::vector<std::thread> threads_;
};

} // namespace moegguf
