// copies.h: the link into one tier's slots on a device: copies from slots in RAM and from others on the device. Their
// thread has a backend of its own, which is a stream of its own where the device has streams.
//
// It fills slots that have a source (tier.h), and chooses none.
#pragma once

#include "link.h"
#include "tier.h"

#include <thread>

namespace moegguf {

class Copies final : public Link {
  public:
    Copies(const Layout & layout, Shared & shared, const Tiers & tiers, Tier & to);
    ~Copies() override { stop(); }

    // All under the store's lock.
    void queue(int s, uint8_t kinds, bool demand); // matrices that the source of slot s has; wake() when all are queued
    void wake() { work_.notify_one(); }
    // The thread that computes submits what is queued for its layer, and leaves it to the other one to note the end.
    // The lock is free meanwhile.
    void submit_own(Lock & lock);
    void drop_prefetches(int il); // of this layer, to slots that are not pinned
    bool idle() const { return demand_.empty() && prefetch_.empty(); }

    // Link.
    void start_threads() override;
    bool begin_next(Job & job) override;
    void finish(const Job & job, const std::string & why) override;
    uint64_t link_bytes(const Job & job) const override; // 0 within the device: its memory is far faster than any link
    void note_time(uint64_t ns) override;
    void stop(); // the store, and the thread

    // Whether copies can be waited for by the stream that computes: the device has events.
    bool has_events() const { return event_ != nullptr; }
    uint8_t submitted(int s) const;    // matrices on their way in the copies' stream; any thread
    void order(ggml_backend_t stream); // what is computed there from now on comes after what was submitted; any thread

  private:
    // Copies that are submitted together, a matrix each.
    struct Batch {
        std::vector<Job> jobs;
        uint64_t start_ns = 0;
        std::string why; // it cannot be copied; empty: it can
    };

    void run();
    bool take_batch();
    void submit(Batch & batch, Lock & lock);
    void complete(Batch & batch, Lock & lock);
    void copy(std::vector<Job> & jobs) const;
    int count_neighbours(const std::vector<Job> & jobs, size_t first) const;

    Tier & to_;
    ggml_backend_ptr backend_;
    ggml_backend_event_ptr event_;                // behind the batch submitted last; nullptr: the device has none
    std::mutex event_mutex_;                      // of event_ and n_in_flight_
    int n_in_flight_ = 0;                         // batches
    std::mutex submit_mutex_;                     // of the backend's stream, for those who put copies into it
    std::vector<std::atomic<uint8_t>> submitted_; // [n_slots]
    Batch batch_;                                 // of the thread
    Batch own_;                                   // of the thread that computes, until the other one has noted it
    bool own_submitted_ = false;
    std::condition_variable work_;
    std::thread thread_;
};

} // namespace moegguf
