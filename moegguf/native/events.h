// events.h: passes events from compute threads to a listener, which runs on its own thread.
//
// This part copies events into its own ring and calls the listener. It does not know about slots, never takes the
// store's lock itself, and is never called under that lock. The listener's callbacks may call the store, and then take
// the lock on the listener's thread.
#pragma once

#include "moegguf.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace moegguf {

// A bounded ring of records for a listener. While the ring is full, new records are dropped and counted. With
// MOEGGUF_LISTEN_EVERYTHING, compute threads wait for free space instead. With MOEGGUF_LISTEN_LOCKSTEP, they wait until
// earlier records are delivered. In all other cases, they do not wait for the listener.
class Events {
  public:
    Events() = default;
    ~Events() { stop(); }

    void start(const moegguf_listener & listener);
    void stop(); // returns after the last callback
    bool on() const { return on_; }
    bool wants_weights() const { return on_ && (flags_ & MOEGGUF_LISTEN_WEIGHTS); }
    bool wants_inputs(int n_tokens) const {
        return on_ && (flags_ & MOEGGUF_LISTEN_INPUTS) && n_tokens <= max_input_tokens_;
    }

    void tokens(moegguf_tokens_event event);
    void routing(moegguf_routing_event event);
    void keep_step(); // waits until every record is delivered, if flags_ has MOEGGUF_LISTEN_LOCKSTEP
    uint64_t dropped() const;

  private:
    struct Record {
        bool routed = true; // true: the record holds a routing event; false: announced tokens
        moegguf_tokens_event tokens;
        moegguf_routing_event routing;
        std::vector<int32_t> words; // memory of all arrays of the event; reused for later events if it is small
    };
    struct Array { // a pointer field of an event; the field points to n values of 4 bytes, or is NULL
        const void ** pointer;
        size_t n;
    };
    using Lock = std::unique_lock<std::mutex>;

    bool has_space(size_t n_words) const;
    template <typename Event>
    void post(Event & event, Event Record::* kind, std::initializer_list<Array> arrays);
    void end();
    void run();

    static constexpr size_t capacity = 4096;
    // Limit on the total number of 4-byte words in the ring's arrays; an event that is alone in the ring may exceed it.
    static constexpr size_t most_words = 64u << 20;
    static constexpr size_t lazy_events = 512; // number of waiting events at which a lazy listener is woken
    static constexpr std::chrono::milliseconds lazy_wait{100};
    static constexpr size_t kept_words = 1u << 16; // a record with room for more words frees its memory after delivery

    std::mutex control_; // lets only one start() or stop() run at a time
    mutable std::mutex mutex_;
    std::condition_variable arrived_;
    std::condition_variable delivered_;
    std::vector<Record> ring_;
    size_t head_ = 0;
    size_t size_ = 0;
    size_t n_words_ = 0; // total number of 4-byte words in the ring's arrays
    uint64_t dropped_ = 0;
    bool delivering_ = false;
    bool stopping_ = false;
    std::atomic<bool> on_{false};
    std::atomic<uint32_t> flags_{0};
    std::atomic<int> max_input_tokens_{0};
    moegguf_listener listener_{};
    std::thread thread_;
};

} // namespace moegguf
