// clock.cpp: implements clock.h: a clock of real time, and a clock of virtual time for simulations.
#include "clock.h"

#include "layout.h"
#include "link.h"

#include <algorithm>
#include <vector>

namespace moegguf {
namespace {

class RealClock final : public Clock {
  public:
    uint64_t now_ns() const override { return moegguf::now_ns(); }
    bool wait(std::condition_variable & changed, std::unique_lock<std::mutex> & lock, Deadline deadline) override {
        if (deadline == Deadline::max()) {
            changed.wait(lock);
            return true;
        }
        return changed.wait_until(lock, deadline) == std::cv_status::no_timeout;
    }
    void carry(Link & link, LinkSpeed) override { link.start_threads(); }
    void advance(uint64_t) override {
        throw Error(MOEGGUF_INVALID, "only a simulation has a modelled clock that can be moved");
    }
};

// A clock for simulations. Each link carries one transfer at a time. A transfer takes the link's latency plus the
// transfer's bytes divided by the bandwidth. A transfer of 0 bytes, or over a link with bandwidth 0, takes no time.
// wait() starts transfers on idle links. If there is nothing to start, wait() advances the time to the end of the next
// transfer.
class VirtualClock final : public Clock {
  public:
    explicit VirtualClock(uint64_t & time_ns) : time_ns_(time_ns) {}

    uint64_t now_ns() const override { return get(time_ns_); }

    bool wait(std::condition_variable &, std::unique_lock<std::mutex> &, Deadline) override {
        return start_idle() || end_first(UINT64_MAX);
    }

    void carry(Link & link, LinkSpeed speed) override { links_.push_back({&link, speed}); }

    void advance(uint64_t ns) override {
        const uint64_t end_ns = now_ns() + ns;
        do {
            while (start_idle()) {}
        } while (end_first(end_ns));
        set_gauge(time_ns_, end_ns);
    }

  private:
    struct Carried {
        Link * link;
        LinkSpeed speed;
        bool busy = false;
        Job job;
        uint64_t done_ns = 0;
    };

    bool start_idle() {
        bool started = false;
        for (Carried & one : links_) {
            if (one.busy || !one.link->begin_next(one.job)) { continue; }
            const uint64_t bytes = one.link->link_bytes(one.job);
            const bool free = bytes == 0 || one.speed.bytes_per_ns == 0;
            const uint64_t ns = free ? 0 : uint64_t(one.speed.latency_ns + bytes / one.speed.bytes_per_ns);
            one.link->note_time(ns);
            one.done_ns = now_ns() + ns;
            one.busy = started = true;
        }
        return started;
    }

    // Finishes the running transfer that ends first, and advances the time to its end. Returns false if no transfer
    // ends by the time end_ns.
    bool end_first(uint64_t end_ns) {
        Carried * first = nullptr;
        for (Carried & one : links_) {
            if (one.busy && (!first || one.done_ns < first->done_ns)) { first = &one; }
        }
        if (!first || first->done_ns > end_ns) { return false; }
        set_gauge(time_ns_, std::max(now_ns(), first->done_ns));
        first->busy = false;
        first->link->finish(first->job, {});
        return true;
    }

    uint64_t & time_ns_;
    std::vector<Carried> links_;
};

} // namespace

std::unique_ptr<Clock> make_clock(uint64_t * virtual_ns) {
    if (virtual_ns) { return std::make_unique<VirtualClock>(*virtual_ns); }
    return std::make_unique<RealClock>();
}

} // namespace moegguf
