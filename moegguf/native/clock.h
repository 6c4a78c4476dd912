// clock.h: one monotonic clock for every figure that the store reports.
#pragma once

#include <chrono>
#include <cstdint>

namespace moegguf {

inline uint64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

} // namespace moegguf
