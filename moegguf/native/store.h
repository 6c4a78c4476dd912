// store.h: the expert store. Gates come in, slots go out; readers fill them in between.
#pragma once

#include "events.h"
#include "files.h"
#include "link.h"
#include "pool.h"
#include "queues.h"
#include "residency.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace moegguf {

class Store;

// One llama_context's way into the store: its pins, and why its pass failed.
struct Lane {
    static constexpr int between_passes = INT32_MAX; // any layer that comes next starts a pass

    explicit Lane(Store & store, int id) : store(store), id(id) {}

    Store & store;
    const int id;
    int il = between_passes; // the layer computing now
    uint64_t pass = 0;
    int n_tokens = 0;  // of the pass: its last layer may compute fewer
    int sequence = -1; // as announced, with the phase and the tokens that no pass has taken yet
    int phase = MOEGGUF_PREFILL;
    int first_token = -1;
    int next_token = 0;
    int n_announced = 0;
    std::vector<int> pinned;
    std::vector<int> distinct; // experts of this gate, in order of first choice
    std::vector<int> slot_of;  // [n_expert_max], -1 where not chosen at this gate
    uint64_t waited_ns = 0;    // at this gate
    std::vector<int32_t> ids;  // scratch for devices whose memory is not the host's
    std::vector<float> weights;
    std::vector<float> inputs;
    moegguf_failure failure{};
    std::atomic<bool> failed{false};
    ggml_backend_sched_eval_callback next_eval = nullptr;
    void * next_user = nullptr;
};

class Store {
  public:
    explicit Store(const moegguf_config & config);
    ~Store();
    Store(const Store &) = delete;
    Store & operator=(const Store &) = delete;

    const Layout & layout() const { return layout_; }
    ggml_backend_buffer_type_t buft();
    ggml_tensor * pool_tensor(const char * name) const;

    // The gate: expert_ids [n_tokens][n_expert_used] become slot ids in place. Waits for the matrices in
    // `wait_kinds`. On failure the lane says why and the slot ids are safe to compute with.
    void gate(Lane & lane, int il, int32_t * ids, int n_expert_used, int n_tokens, uint8_t wait_kinds,
              const Routed & routed = {});
    void announce_tokens(Lane & lane, const moegguf_tokens_event & event);
    const Events & events() const { return events_; }
    bool pending(Lane & lane, uint8_t kinds);
    void wait(Lane & lane, uint8_t kinds);
    bool idle_gate(int il) const; // nothing to do or to tell at this layer: every expert is in its own slot
    void count_idle_gate(Lane & lane, int il, int n_expert_used);
    bool overlap() const { return flags_ & MOEGGUF_OVERLAP; }

    std::unique_ptr<Lane> open_lane();
    void close_lane(Lane & lane);
    void take_failure(Lane & lane, moegguf_failure & out, bool clear);
    bool cancelled() const { return cancel_; }

    void set_scores(const float * scores, size_t n);
    void set_rates(const moegguf_rates * rates);
    void prefetch(const int32_t * il, const int32_t * experts, size_t n);
    void listen(const moegguf_listener * listener);
    void cancel(bool on);
    void resize(int n_slots);
    bool drain(double timeout_s);
    void advance(uint64_t ns);
    void read_slot(int matrix, int slot, void * out, size_t n);
    double probe(double seconds) const;
    void counters(moegguf_counters & out) const;
    void info(moegguf_pool_info & out) const;
    void residency(uint8_t * map, size_t n) const;
    void activity(uint32_t * uses, uint32_t * loads, size_t n) const;
    void watch(bool on);
    bool forked() const;

  private:
    using Lock = std::unique_lock<std::mutex>;
    using Deadline = std::chrono::steady_clock::time_point;

    // gate, step by step (store_gate.cpp); all under the lock
    void begin_pass(Lane & lane, int il, int n_tokens);
    bool collect(Lane & lane, int il, const int32_t * ids, size_t n);
    void drop_stale(int il);
    bool pin_all(Lane & lane, Moment now, Lock & lock);
    bool pin_absent(Lane & lane, Moment now, Lock & lock);
    bool wait_for_slot(Deadline deadline, Lock & lock);
    void look_up(int il, int slot);
    int take_slot(int il, int expert, Moment now, float min_worth);
    void request(Lane & lane);
    void sweep_ahead(int il);
    void unpin(Lane & lane);
    void retire(int s);
    void release_slot(int s);
    void apply_resize();
    bool ready(const Lane & lane, uint8_t kinds) const;
    void wait_locked(Lane & lane, uint8_t kinds, Lock & lock);
    uint64_t clock_ns() const;
    void count_stall(Lane & lane, uint64_t since_ns);
    void fail(Lane & lane, moegguf_status status, int il, int expert, const std::string & why);

    // transfers (store_transfers.cpp)
    void run_reader(int index);
    bool next_job(Job & job);
    bool start_wish(int il, int expert, Job & job);
    bool next_fill(Job & job);
    void queue(int s, uint8_t kinds, bool needed);
    void transfer(const Job & job, const Slot & slot, const Staging & staging, ReadStats & stats, uint64_t & upload_ns);
    void finish(const Job & job, bool ok, const std::string & why);
    uint64_t job_bytes(const Job & job) const;
    void announce(int s, bool resident);
    void sim_step();

    Layout layout_;
    const uint32_t flags_;
    const int n_readers_;
    const int pid_;
    Residency residency_;
    std::unique_ptr<Pool> pool_;
    std::unique_ptr<Files> files_;
    std::vector<std::unique_ptr<Staging>> staging_;
    std::unique_ptr<ggml_backend_buffer_type, void (*)(ggml_backend_buffer_type *)> buft_;
    ModelledLink link_;

    mutable std::mutex mutex_;
    std::condition_variable work_; // readers sleep on it
    std::condition_variable done_; // lanes sleep on it
    std::mutex upload_;            // devices that are not host memory take one upload at a time
    Ring<Job> needed_;
    Ring<Job> wanted_;
    Ring<Wish> wishes_;
    int fill_next_ = 0;
    moegguf_counters counters_{};
    Moment now_{0, false, false};
    std::string read_error_;
    int n_lanes_ = 0;
    int lane_ids_ = 0;
    bool short_of_slots_ = false; // a lane waits for slots: nobody else may take any
    int resize_to_ = 0;
    bool watched_ = false; // someone looks at activity: gates are not idle
    bool stopping_ = false;
    std::atomic<bool> cancel_{false};
    int n_absent_chunks_; // 0: every expert of a resident store is there
    Events events_;
    std::vector<std::thread> readers_;
};

constexpr uint8_t all_kinds = (1 << MOEGGUF_MAX_KINDS) - 1;
constexpr uint8_t down_kind = 1 << MOEGGUF_DOWN;

} // namespace moegguf

struct moegguf_store {
    explicit moegguf_store(const moegguf_config & config) : store(config) {}
    moegguf::Store store;
};

struct moegguf_lane {
    std::unique_ptr<moegguf::Lane> lane;
};
