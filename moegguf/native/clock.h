// clock.h: a clock tells a store the time and carries its transfers, in real time or, for simulations, in virtual time.
//
// Nothing else in a store knows which clock it has. Knows no slots and no files.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace moegguf {

class Link;
struct LinkSpeed;

// One monotonic clock for every figure of real time.
inline uint64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Updates an exponential moving average over some tens of values; 0: there was none yet.
inline void update_ema(float & mean, float value) { mean += mean > 0 ? (value - mean) / 32 : value; }

class Clock {
  public:
    using Deadline = std::chrono::steady_clock::time_point;

    virtual ~Clock() = default;
    virtual uint64_t now_ns() const = 0;

    // Returns when something may have changed that threads tell by `changed`; the lock is free meanwhile. false:
    // nothing will, or not before the deadline.
    virtual bool wait(std::condition_variable & changed, std::unique_lock<std::mutex> & lock, Deadline deadline) = 0;

    virtual void carry(Link & link, LinkSpeed speed) = 0; // carries a link's transfers; earlier links go first
    // None in virtual time: its caller does the work. Throws Error.
    virtual std::thread start_thread(const char * what, std::function<void()> body) = 0;
    // Compute time passes, under the lock. Throws Error(INVALID) where time is real.
    virtual void advance(uint64_t ns) = 0;
};

// `virtual_ns`: where virtual time is counted; nullptr: real time.
std::unique_ptr<Clock> make_clock(uint64_t * virtual_ns);

} // namespace moegguf
