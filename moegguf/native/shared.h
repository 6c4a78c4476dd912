// shared.h: what the parts of one store share: its lock, its switches, its counters.
#pragma once

#include "clock.h"
#include "counters.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>

#include <pthread.h>

namespace moegguf {

using Lock = std::unique_lock<std::mutex>;

// How many times this process was forked from one that had the library loaded. Counted, because getpid() would
// be a system call at every routing event.
inline std::atomic<uint32_t> fork_generation{0};
inline const int fork_counted = pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1); });

struct Shared {
    explicit Shared(uint32_t flags) : flags(flags) {}

    const uint32_t flags;         // enum moegguf_flag
    std::mutex mutex;             // "the store's lock": residency, numbering and queues
    std::condition_variable work; // readers wait on it
    std::condition_variable done; // lanes wait on it
    Counters counters;
    std::atomic<bool> cancelled{false};
    std::atomic<bool> stopping{false};
    std::string error;                 // why a transfer failed last; under the lock
    std::atomic<uint64_t> given_up{0}; // how often a kernel left matrices out, because it was cancelled

    bool has(moegguf_flag flag) const { return flags & flag; }
    bool simulated() const { return has(MOEGGUF_SIMULATE); }

    // In a child the locks and threads are the parent's: nothing may be touched.
    bool forked() const { return fork_generation.load(std::memory_order_relaxed) != born_; }

    // Real, or modelled.
    uint64_t clock_ns() const { return simulated() ? get(counters.sim_clock_ns) : now_ns(); }

  private:
    const uint32_t born_ = fork_generation;
};

} // namespace moegguf
