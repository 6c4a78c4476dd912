// copies.h: the link that copies experts into the slots or staging tensors of one tier that is filled from RAM. The
// sources are slots in RAM or other slots on the same device. Its copy thread has its own ggml backend, and so its own
// stream if the device has streams. With Remedy::own_copies, the compute thread may submit the copies that its layer
// demands. The copy thread still records their completion.
//
// A link of this class fills only slots that already have a source (tier.h), and chooses no slots itself.
#pragma once

#include "link.h"
#include "tier.h"

#include <thread>

namespace moegguf {

class Copies final : public Link {
  public:
    Copies(const Layout & layout, Shared & shared, const Tiers & tiers, Tier & to);
    ~Copies() override { stop(); }

    // Callers of the following functions must hold the store's lock.
    void queue(int s, uint8_t kinds, bool demand); // queues copies from the source of slot s; wake() starts them
    void wake() { work_.notify_one(); }
    // Submits all queued demand copies on the calling compute thread. The copy thread records their completion. If the
    // copy thread has not yet recorded the completion of the previous batch from submit_own(), it submits the new
    // copies instead. Releases the lock during the submission.
    void submit_own(Lock & lock);
    bool idle() const { return demand_.empty() && prefetch_.empty(); }

    // Overrides of Link's functions.
    void start_threads() override;
    bool begin_next(Job & job) override;
    void finish(const Job & job, const std::string & why) override;
    uint64_t link_bytes(const Job & job) const override; // 0 for a copy within the device, which takes no virtual time
    void note_time(uint64_t ns) override;
    // Sets the stop flag of the whole store, joins the copy thread, and waits for the submitted copies.
    void stop();

    // Returns true if the device has events. The compute stream can then itself wait for copies.
    bool has_events() const { return event_ != nullptr; }
    // Returns the bits of slot s's matrices whose copies are submitted but not finished; 0 if the device has no events.
    // Any thread may call this.
    uint8_t submitted(int s) const;
    // Makes later work in this stream wait for copies that are submitted but not finished. Any thread may call this.
    void order(ggml_backend_t stream);

  private:
    // Copies that are submitted together. Each job is one matrix.
    struct Batch {
        std::vector<Job> jobs;
        uint64_t start_ns = 0;
        std::string why; // reason why the submission failed; empty: it succeeded
    };

    void run();
    bool take_batch();
    void submit(Batch & batch, Lock & lock);
    void complete(Batch & batch, Lock & lock);
    void copy(std::vector<Job> & jobs) const;
    bool continues(const Job & job, const Job & next) const;

    Tier & to_;
    ggml_backend_ptr backend_;
    ggml_backend_event_ptr event_; // event recorded after the last submitted batch; nullptr: the device has no events
    std::mutex event_mutex_;       // guards event_ and n_in_flight_
    int n_in_flight_ = 0;          // number of batches submitted but not finished; always 0 if the device has no events
    std::mutex submit_mutex_;      // held while copies are put into the backend's stream
    // [n_slots] bits of matrices whose copies are submitted but not finished.
    std::vector<std::atomic<uint8_t>> submitted_;
    Batch batch_; // batch that the copy thread submits
    Batch own_;   // batch that the compute thread submits and the copy thread completes
    bool own_submitted_ = false;
    std::condition_variable work_;
    std::thread thread_;
};

} // namespace moegguf
