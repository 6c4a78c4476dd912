// clock.h: a store's clock, in real time or, for simulations, in virtual time. In real time, each link's own threads
// run its transfers. In virtual time, the clock runs them.
//
// A simulation has no memory for experts and no predictor thread. Code that would use either checks for a simulation
// itself. Compute threads wait by calling the clock's wait(). The clock does not know about slots or files.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace moegguf {

class Link;
struct LinkSpeed;

// Returns the time of the monotonic clock in nanoseconds. This is real time, even in a simulation.
inline uint64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Updates an exponential moving average over about 32 values. A mean of 0 means that there is no value yet, and is
// replaced by `value`.
inline void update_ema(float & mean, float value) { mean += mean > 0 ? (value - mean) / 32 : value; }

class Clock {
  public:
    using Deadline = std::chrono::steady_clock::time_point;

    virtual ~Clock() = default;
    virtual uint64_t now_ns() const = 0;

    // Releases the lock and waits until another thread notifies `changed` or a spurious wake-up happens. Returns false
    // if the deadline has passed. A virtual clock does not wait: it starts transfers, or advances the time to the end
    // of the next transfer. It returns false if no transfer can start or end.
    virtual bool wait(std::condition_variable & changed, std::unique_lock<std::mutex> & lock, Deadline deadline) = 0;

    // Adds a link, whose transfers can run from now on. In real time, starts the link's own threads, and ignores
    // `speed`. In virtual time, idle links start transfers in the order in which the links were added.
    virtual void carry(Link & link, LinkSpeed speed) = 0;
    // Advances the clock by `ns` nanoseconds of compute time, and starts and finishes the transfers of that time. The
    // caller holds the store's lock. Throws Error(INVALID) in real time.
    virtual void advance(uint64_t ns) = 0;
};

// Creates a clock. `virtual_ns`: the counter of virtual time; nullptr: the clock runs in real time.
std::unique_ptr<Clock> make_clock(uint64_t * virtual_ns);

} // namespace moegguf
