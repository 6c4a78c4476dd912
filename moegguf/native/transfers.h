// transfers.h: the queue of transfers, and the link from the model's files. The queue decides which bytes move next:
// reads that layers wait for (demands), and prefetches. Copies from RAM to a device are another link (copies.h).
//
// A reader thread takes the next job under the store's lock. Streamed reads come first, then demands and prefetches. A
// prefetch gets its slot only when a reader takes it, and may evict another expert. The thread reads the bytes without
// the lock. Then it takes the lock again, marks the matrix as there, settles the slot, and queues the copy to a device
// that waits for the matrix. This class may assign, fill and vacate slots of every tier.
#pragma once

#include "copies.h"
#include "drives.h"
#include "link.h"

namespace moegguf {

// The cause of a prefetch. Causes are served in this order.
enum class Cause : uint8_t { request, forecast, warm_start };

// An expert to prefetch. A request or a forecast evicts only an expert that is worth less. The eviction policy computes
// the worth of a requested expert. A warm start takes only free slots.
struct Want {
    int il;
    int expert;
    Cause cause = Cause::request;
    float value = 0; // worth of a forecast expert, comparable with a chance of use
    // LayerStep::number of the layer for which the use is forecast; a prefetch at this step is too late.
    uint64_t deadline = UINT64_MAX;
};

// Reads of streamed experts, which come before all other reads (streamed_supply.cpp). Callers hold the store's lock.
class StreamedReads {
  public:
    virtual ~StreamedReads() = default;
    virtual bool next_read(Job & job) = 0;     // writes the next read for which a slot is free to `job`; false: none
    virtual void arrived(const Job & job) = 0; // is called when the bytes of a matrix are in its slot
};

class Transfers final : public Link {
  public:
    // n_readers: number of reader threads for each copy of the files. Throws Error(INVALID) if it is below 1 or too
    // large.
    Transfers(const Layout & layout, int n_readers, Shared & shared, const Tiers & tiers);

    // Must be called before anything is computed. `streamed` may be destroyed only after stop().
    void set_streamed(StreamedReads & streamed) { streamed_ = &streamed; }
    void stop(); // sets the stop flag of the whole store, and joins the reader threads

    // Callers of the next functions hold the store's lock. Queues every matrix of these slots that is neither there nor
    // being read, because a layer waits for it. `submits`: the caller itself will call submit_own() of
    // the tier's copies, so the copy thread is not woken.
    void demand(Tier & tier, const std::vector<int> & slots, bool submits = false);
    void copy(Tier & to, int s, bool demand); // queues transfers of all matrices of slot s from its source
    // Adds an expert to prefetch. Causes are served in the order of enum Cause. Experts of one cause are served in the
    // order in which they were added. Call wake_readers() after the last expert.
    void want(const Want & want);
    void forget(Cause cause); // drops prefetches of this cause that have no slot yet
    void wake_readers() { shared_.work.notify_all(); }
    void wake_idle_reader();      // wakes a reader thread if forecasts wait and no demand is being read
    void drop_prefetches(int il); // drops prefetches of this layer, except those into pinned slots
    void pause_prefetch(bool on); // while on, prefetches take no slots, because a context waits for slots
    void pause_fill(bool on);     // while on, free slots are not filled in the background
    bool reading() const { return get(shared_.counters.chunks_reading) > 0; }
    bool idle() const; // true: nothing is queued or under way, and no slot is left to fill
    // Number of waiting requests and forecasts; any thread.
    uint64_t n_wanted() const { return wants_[0].size() + wants_[1].size(); }

    void set_step(const LayerStep & now);
    uint64_t step() const { return now_.number; } // LayerStep::number of the last routing event
    // Returns the share (0 to 1) of an expert's transfer that can end before the layer `distance` layers ahead is
    // routed. Returns 1 until both times have been measured.
    float share_in_time(int distance) const;

    // Overridden functions of Link.
    void start_threads() override;
    bool begin_next(Job & job) override;
    void finish(const Job & job, const std::string & why) override;

    // Any thread may call the next functions. direct() returns true if all files are read with O_DIRECT; false in a
    // simulation, which reads no files.
    bool direct() const { return drives_ && drives_->direct(); }
    void drive_info(int index, moegguf_drive_info & info) const; // throws Error(INVALID) if there is no such drive
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
    int n_at_once_ = 1; // largest number of transfers at the same time
    StreamedReads * streamed_ = nullptr;
    Ring<Want> wants_[n_causes]; // [cause] prefetches that have no slot yet
    int n_demand_reading_ = 0;
    // Number of experts that the background fill has tried: first every expert on devices, then every expert in RAM.
    size_t n_filled_ = 0;
    const size_t n_to_fill_;
    bool paused_ = false;
    bool fill_paused_ = false;
    LayerStep now_;      // layer step of the last routing event
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
