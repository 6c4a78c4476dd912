// clock.h: one monotonic clock for every figure that the store reports.
#pragma once

#include <chrono>
#include <cstdint>

namespace moegguf {

inline uint64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// A moving average over some tens of values; 0: none yet.
template <typename T>
void fade_in(T & mean, T value) {
    mean += mean > 0 ? (value - mean) / 32 : value;
}

} // namespace moegguf
