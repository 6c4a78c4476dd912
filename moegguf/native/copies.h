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
    void run();
    void submit_batch();
    void mark_submitted(Lock & lock);
    int count_neighbours(size_t first) const;

    Tier & to_;
    ggml_backend_ptr backend_;
    ggml_backend_event_ptr event_; // behind the batch submitted last; nullptr: the device has none
    std::mutex event_mutex_;       // of event_ and in_flight_
    bool in_flight_ = false;
    std::vector<std::atomic<uint8_t>> submitted_; // [n_slots]
    std::vector<Job> batch_;                      // of the thread, one matrix each
    std::condition_variable work_;
    std::thread thread_;
};

} // namespace moegguf
