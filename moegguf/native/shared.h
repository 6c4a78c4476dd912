// shared.h: the state that most parts of one store share: the lock, flags, the cancel switch, the store-wide counters,
// the clock, and the functions with which compute threads wait. Each tier has counters of its own (tier.h). The
// switch of moegguf_store_watch() is in class Store, and the listener's state is in class Events.
//
// READY bits (Residency::ready) are read without the lock. A thread that finds a needed bit unset takes the lock and
// waits on `done`, which is notified at the end of each transfer. The wait also ends when the store is cancelled or is
// being closed. This file knows nothing about slots and queues.
#pragma once

#include "clock.h"
#include "moegguf.h"

#include <atomic>
#include <string>

#include <pthread.h>

namespace moegguf {

using Lock = std::unique_lock<std::mutex>;

// Counters in a struct of the C ABI (moegguf.h). The functions below access them atomically with relaxed order, because
// no other data depends on them.
template <typename Figures>
struct Counted : Figures {
    Counted() : Figures{} {}
    Counted(const Counted &) = delete;
    Counted & operator=(const Counted &) = delete;
};
using Counters = Counted<moegguf_counters>;
using TierCounters = Counted<moegguf_tier_info>; // only the struct's fields before pool_bytes are counters

inline void count(uint64_t & figure, uint64_t n = 1) { __atomic_fetch_add(&figure, n, __ATOMIC_RELAXED); }

inline void uncount(uint64_t & figure, uint64_t n = 1) { __atomic_fetch_sub(&figure, n, __ATOMIC_RELAXED); }

inline void set_gauge(uint64_t & figure, uint64_t n) { __atomic_store_n(&figure, n, __ATOMIC_RELAXED); }

inline uint64_t get(const uint64_t & figure) { return __atomic_load_n(&figure, __ATOMIC_RELAXED); }

// Reads the counters in the first n_bytes of `figures`, and adds each one to the same counter in `to`.
inline void add(const uint64_t * figures, size_t n_bytes, uint64_t * to) {
    for (size_t i = 0; i < n_bytes / sizeof(*to); i++) { to[i] += get(figures[i]); }
}

// Number of forks between the process that loaded the library and this one. A counter is used because getpid() would be
// a system call at every routing event.
inline std::atomic<uint32_t> fork_generation{0};
inline const int fork_counted = pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1); });

inline thread_local uint64_t waited_ns = 0; // real time that this thread has spent in the wait functions of Shared

constexpr char forked_text[] = "the model was loaded in the parent process; load it again in this one";

struct Shared {
    explicit Shared(uint32_t flags)
        : flags(flags),
          clock(make_clock(flags & MOEGGUF_SIMULATE ? &counters.sim_clock_ns : nullptr)) {}

    const uint32_t flags;         // enum moegguf_flag
    std::mutex mutex;             // "the store's lock", which guards residency, numbering, queues and policies
    std::condition_variable work; // reader threads wait on it for work
    std::condition_variable done; // threads that need slots or bytes wait on it
    Counters counters;
    const std::unique_ptr<Clock> clock;
    std::atomic<bool> cancelled{false};
    std::atomic<bool> stopping{false};
    std::string error; // reason for the last failure of a transfer; guarded by the lock
    // Number of times that a kernel stopped waiting because the store was cancelled or closed, and skipped matrices.
    std::atomic<uint64_t> given_up{0};
    std::atomic<uint64_t> lost_rows{0}; // number of times that a kernel did not get rows of a table
    moegguf_status lost_rows_status =
        MOEGGUF_OK; // status of the last time, whose reason is `error`; guarded by the lock

    bool has(moegguf_flag flag) const { return flags & flag; }

    // Returns true in a child process of the process that opened the store. The locks and threads belong to the parent,
    // so the child must not touch them.
    bool forked() const { return fork_generation.load(std::memory_order_relaxed) != born_; }

    // Waits until done() returns true. done() is called under the lock, once at the start and then after each
    // notification; the lock is free in between. Returns false if the store is cancelled or closed, or if nothing is
    // left to wait for (virtual time).
    template <typename Done>
    bool wait(Lock & lock, Done done) {
        return wait_for(lock, done, Clock::Deadline::max(), [this] { return cancelled || stopping; });
    }
    // Waits until done() returns true, the deadline passes, or nothing is left to wait for (virtual time). Returns the
    // last result of done(). Unlike wait(), this function keeps waiting while the store is cancelled or being closed.
    template <typename Done>
    bool wait_regardless(Lock & lock, Done done, Clock::Deadline deadline) {
        return wait_for(lock, done, deadline, [] { return false; });
    }

  private:
    template <typename Done, typename Ends>
    bool wait_for(Lock & lock, Done done, Clock::Deadline deadline, Ends ends) {
        if (done()) { return true; }
        const uint64_t start = now_ns();
        bool is_done = false, goes_on = true;
        while (!is_done && goes_on && !ends()) {
            goes_on = clock->wait(this->done, lock, deadline);
            is_done = done();
        }
        waited_ns += now_ns() - start;
        return is_done;
    }

    const uint32_t born_ = fork_generation;
};

} // namespace moegguf
