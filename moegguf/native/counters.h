// counters.h: figures that any thread may raise or read without a lock.
// Knows nothing of what is counted.
#pragma once

#include "moegguf.h"

namespace moegguf {

// moegguf_counters as the parts of a store count in it. Every access is atomic and relaxed: figures order nothing.
struct Counters : moegguf_counters {
    Counters() : moegguf_counters{} {}
    Counters(const Counters &) = delete;
    Counters & operator=(const Counters &) = delete;
};

inline void count(uint64_t & figure, uint64_t n = 1) { __atomic_fetch_add(&figure, n, __ATOMIC_RELAXED); }

inline void uncount(uint64_t & figure, uint64_t n = 1) { __atomic_fetch_sub(&figure, n, __ATOMIC_RELAXED); }

inline void set_gauge(uint64_t & figure, uint64_t n) { __atomic_store_n(&figure, n, __ATOMIC_RELAXED); }

inline uint64_t get(const uint64_t & figure) { return __atomic_load_n(&figure, __ATOMIC_RELAXED); }

inline void copy(const Counters & from, moegguf_counters & to) {
    constexpr size_t n = sizeof(moegguf_counters) / sizeof(uint64_t);
    static_assert(n * sizeof(uint64_t) == sizeof(moegguf_counters), "every figure is a uint64_t");
    const uint64_t * figures = &from.passes;
    for (size_t i = 0; i < n; i++) { (&to.passes)[i] = get(figures[i]); }
}

} // namespace moegguf
