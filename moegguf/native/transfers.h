// transfers.h: moves experts into slots: queues and reader threads, or a modelled link. What a tier below has comes
// from there (copies.h).
#pragma once

#include "admission.h"
#include "copies.h"
#include "files.h"
#include "streaming.h"

#include <thread>

namespace moegguf {

class Transfers {
  public:
    // Opens the files and starts the readers, unless simulated. Experts of tiers with one below go through its slots.
    Transfers(const Layout & layout, const moegguf_config & config, Shared & shared, Tiers & tiers,
              Streaming & streaming, const Admission & admission);
    ~Transfers();
    Transfers(const Transfers &) = delete;
    Transfers & operator=(const Transfers &) = delete;

    // Under the store's lock.
    // Every matrix of slots of one layer that is not there or being read, before all prefetches.
    void demand(Tier & tier, const std::vector<int> & slots);
    void demand_below(int s);                 // the same of a pinned slot of the tier below, for itself
    void copy(Tier & to, int s, bool demand); // every matrix, from the slot that is its source
    bool prefetch(int il, int expert);        // false: queued already are more than any link moves in time
    void wake_readers() { shared_.work.notify_all(); }
    void set_wishes(const std::vector<Wish> & wishes);           // the most urgent first; replaces those before
    void drop_prefetches(int il);                                // of this layer, in pinned slots excepted
    void set_warm(const std::vector<PrefetchRequest> & experts); // to be put into free slots, replacing those before
    void drop_requests();                                        // prefetches that have no slot yet
    bool reading() const { return get(shared_.counters.chunks_reading) > 0; }
    bool idle() const; // nothing queued, read, or left to fill
    const std::string & error() const { return shared_.error; }
    bool awaits_file(const Tier & tier, int s, uint8_t kinds) const; // some matrices are not even in the tier below
    void hold_prefetches(bool on);                                   // an acquire waits for slots: prefetches take none
    void set_moment(const Moment & now);
    uint64_t turn() const { return now_.turn; } // of the last routing event

    // How much of an expert's transfer fits into the time until `distance` layers from now are routed, at most 1.
    float share_in_time(int distance) const;

    // Simulation, under the store's lock. step: finish the transfer in flight, or start the next.
    void step();
    void advance(uint64_t ns);

    // Any thread.
    bool direct() const { return files_ && files_->direct(); }
    uint64_t staging_bytes() const;
    double probe(double seconds) const; // bytes/s, reading random experts without uploads

  private:
    void start_readers(const moegguf_config & config);
    void run_reader(int index);
    bool next_job(Job & job);
    bool next_speculative(Job & job);
    bool next_queued(Ring<Job> & ring, Job & job);
    bool next_prefetch(Job & job);
    bool next_fill(Job & job);
    bool next_wish(Job & job);
    template <typename BidIn>
    bool start_prefetch(int il, int expert, BidIn bid);
    bool filling() const;
    bool fill(Tier & to, int il, int expert);
    void wake_all(const Tier & to);
    void queue(Tier & to, int s, uint8_t kinds, bool demand);
    void queue_reads(Tier & to, int s, uint8_t kinds, bool demand);
    void find_sources(Tier & to, const std::vector<int> & slots);
    bool look_up_source(Tier & to, int s);
    void take_source(Tier & to, int s, const Bid & bid);
    void pass_on(Tier & to, const Job & job);
    void drop_waiting(Tier & to, int il);
    Tier & tier_of(const Job & job) {
        switch (job.destination.tier) {
            case TierId::lower:
                return *tiers_.below;
            case TierId::staging:
                return *tiers_.of(job.il).staging;
            default:
                return tiers_.of(job.il);
        }
    }
    template <typename Body>
    void for_tiers_above(int il, Body body);
    bool fills_compute() const;
    void begin(Job & job);
    void copy_from_disk(const Job & job, const Staging & staging, ReadStats & stats, uint64_t & upload_ns);
    void write(const Tier & to, int matrix, int slot, int64_t row, int64_t n_rows, const uint8_t * data);
    void finish(const Job & job, const std::string & why);
    void finish_failed(Tier & to, const Job & job, const std::string & why);
    void fail_above(Tier & upper, const Job & job);
    bool start_idle_links();
    ModelledLink * first_to_end();
    void end_transfer(ModelledLink & link);
    uint64_t bytes_of(const Job & job) const;
    void update_gauges();

    const Layout & layout_;
    Shared & shared_;
    Tiers & tiers_;
    Streaming & streaming_;
    const Admission & admission_;
    std::vector<int32_t> missed_; // scratch: experts that were looked up in the tier below
    std::unique_ptr<Files> files_;
    std::vector<std::unique_ptr<Staging>> staging_; // one per reader
    std::mutex upload_;                             // devices that are not host memory take one upload at a time
    ModelledLink link_;
    Ring<Job> demand_;
    Ring<Job> prefetch_;
    Ring<PrefetchRequest> requests_; // prefetches that have no slot yet
    std::vector<Wish> wishes_;
    size_t next_wish_ = 0; // those before it were taken
    int n_demand_reading_ = 0;
    float chunk_ns_ = 0; // moving averages: of a transfer,
    float layer_ns_ = 0; // between layers of a pass of one token, without stall: while the link is free
    uint64_t computed_ns_ = 0;
    std::vector<PrefetchRequest> warm_; // to be put into free slots, the first before all others
    size_t next_warm_ = 0;
    int fill_next_ = 0;
    int fill_next_below_ = 0;
    uint64_t clock_ns_ = 0;    // simulation
    std::vector<int> waiting_; // scratch
    bool held_ = false;
    Moment now_; // the last routing event
    std::vector<std::thread> readers_;
};

} // namespace moegguf
