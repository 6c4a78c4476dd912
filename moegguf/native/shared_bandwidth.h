// shared_bandwidth.h: one direction of a link in real time, whose bandwidth all copies under way share equally.
// It may keep a caller waiting. Knows no device.
#pragma once

#include "clock.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace moegguf {

class SharedBandwidth {
  public:
    SharedBandwidth(double bytes_per_ns, double latency_ns) : bytes_per_ns_(bytes_per_ns), latency_ns_(latency_ns) {}

    // Returns when `bytes` have come through, and runs `copy` meanwhile: as late as its own time, `copy_ns`, allows, so
    // that nobody finds bytes there that the link has not brought yet.
    template <typename Copy>
    void transfer(double bytes, double copy_ns, Copy && copy) {
        wait_until(now_ns() + latency_ns_);
        std::unique_lock<std::mutex> lock(mutex_);
        advance();
        const double end = served_ + bytes; // of what every copy gets
        n_copies_++;
        changed_.notify_all();
        wait_served(lock, end, copy_ns);
        lock.unlock();
        copy();
        lock.lock();
        wait_served(lock, end, 0);
        n_copies_--;
        changed_.notify_all();
    }

  private:
    // The clock of this thread wakes up some 60 us late: the rest is spent looking at it.
    static constexpr double early_ns = 100e3;

    static void wait_until(double until_ns) {
        const double left_ns = until_ns - now_ns();
        if (left_ns > early_ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(int64_t(left_ns - early_ns))); }
        while (now_ns() < until_ns) { std::this_thread::yield(); }
    }

    // Until less than `rest_ns` are missing at the present speed.
    void wait_served(std::unique_lock<std::mutex> & lock, double end, double rest_ns) {
        while (true) {
            advance();
            const double left_ns = (end - served_) * n_copies_ / bytes_per_ns_ - rest_ns;
            if (left_ns <= 0) { return; }
            if (left_ns > early_ns) {
                changed_.wait_for(lock, std::chrono::nanoseconds(int64_t(left_ns - early_ns)));
            } else {
                lock.unlock();
                std::this_thread::yield();
                lock.lock();
            }
        }
    }

    void advance() {
        const uint64_t now = now_ns();
        served_ += (now - at_ns_) * bytes_per_ns_ / std::max(1, n_copies_);
        at_ns_ = now;
    }

    const double bytes_per_ns_, latency_ns_;
    std::mutex mutex_;
    std::condition_variable changed_; // how many share the bandwidth
    int n_copies_ = 0;
    double served_ = 0; // bytes that a copy under way since the beginning would have got
    uint64_t at_ns_ = now_ns();
};

} // namespace moegguf
