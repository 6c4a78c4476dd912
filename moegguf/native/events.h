// events.h: what happened, carried from compute and reader threads to the listener's own thread.
#pragma once

#include "moegguf.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace moegguf {

// A bounded ring of records. When the listener is slower than the model, records are dropped and counted:
// the compute thread never waits for it.
class Events {
  public:
    Events() = default;
    ~Events() { stop(); }

    void start(const moegguf_listener & listener);
    void stop(); // returns after the last callback
    bool on() const { return on_; }

    void gate(const moegguf_gate_event & event);
    void residency(const moegguf_residency_event & event);
    uint64_t dropped() const;

  private:
    struct Record {
        bool is_gate = false;
        moegguf_gate_event gate;
        moegguf_residency_event residency;
        std::vector<int32_t> ids; // keeps its memory from use to use
    };

    Record * claim();
    void run();
    void deliver(const Record & record) const;

    static constexpr size_t capacity = 4096;

    mutable std::mutex mutex_;
    std::condition_variable arrived_;
    std::vector<Record> ring_;
    size_t head_ = 0;
    size_t size_ = 0;
    uint64_t dropped_ = 0;
    bool stopping_ = false;
    std::atomic<bool> on_{false};
    moegguf_listener listener_{};
    std::thread thread_;
};

} // namespace moegguf
