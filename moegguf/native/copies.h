// copies.h: the link into one tier's slots on a device. It copies from slots in RAM and from other slots on the device.
// Its thread has a backend of its own, which is a stream of its own where the device has streams.
//
// It fills slots that have a source (tier.h). It chooses no slots.
#pragma once

#include "link.h"
#include "tier.h"

#include <thread>

namespace moegguf {

class Copies final : public Link {
  public:
    Copies(const Layout & layout, Shared & shared, const Tiers & tiers, Tier & to);
    ~Copies() override { stop(); }

    // Callers hold the store's lock.
    void queue(int s, uint8_t kinds, bool demand); // queues matrices that the source of slot s has; wake() starts them
    void wake() { work_.notify_one(); }
    // Submits the copies that are queued for the layer of the thread that computes. The copy thread notes their end.
    // The lock is free meanwhile.
    void submit_own(Lock & lock);
    void drop_prefetches(int il); // drops prefetches of this layer to slots that are not pinned
    bool idle() const { return demand_.empty() && prefetch_.empty(); }

    // Functions of Link.
    void start_threads() override;
    bool begin_next(Job & job) override;
    void finish(const Job & job, const std::string & why) override;
    uint64_t link_bytes(const Job & job) const override; // 0 within the device: its memory is far faster than any link
    void note_time(uint64_t ns) override;
    // Asks all threads of the store to stop, joins the copy thread, and waits for the copies that are submitted.
    void stop();

    // Returns whether the device has events, so that the stream that computes can wait for copies.
    bool has_events() const { return event_ != nullptr; }
    uint8_t submitted(int s) const;    // matrices on their way in the copies' stream; any thread
    void order(ggml_backend_t stream); // lets later work of this stream wait for the submitted copies; any thread

  private:
    // Copies of one matrix each that are submitted together.
    struct Batch {
        std::vector<Job> jobs;
        uint64_t start_ns = 0;
        std::string why; // reason why the batch cannot be copied; empty: it can
    };

    void run();
    bool take_batch();
    void submit(Batch & batch, Lock & lock);
    void complete(Batch & batch, Lock & lock);
    void copy(std::vector<Job> & jobs) const;
    int count_neighbours(const std::vector<Job> & jobs, size_t first) const;

    Tier & to_;
    ggml_backend_ptr backend_;
    ggml_backend_event_ptr event_;                // follows the batch submitted last; nullptr: the device has none
    std::mutex event_mutex_;                      // guards event_ and n_in_flight_
    int n_in_flight_ = 0;                         // batches on their way
    std::mutex submit_mutex_;                     // held while copies are put into the backend's stream
    std::vector<std::atomic<uint8_t>> submitted_; // [n_slots]
    Batch batch_;                                 // batch of the copy thread
    Batch own_;                                   // batch of the thread that computes, until the copy thread notes it
    bool own_submitted_ = false;
    std::condition_variable work_;
    std::thread thread_;
};

} // namespace moegguf
