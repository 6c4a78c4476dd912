// switches.h: "remedies": optimisations for layers with slots on a device. Each can be switched off, so that one
// library can measure the effect of each remedy (docs/gpu.md, "The short run"). They change only the speed, never a bit
// of a result.
//
// The environment variable MOEGGUF_SWITCHES holds the sum of the bits of the remedies that are on. It is read when the
// library is loaded.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace moegguf {

enum class Remedy : uint32_t {
    quiet_copies = 1, // the copy thread wakes up only when something is queued for it
    pinned_ids = 2,   // ids of a device are copied through pinned memory, which the device reads and writes by itself
    own_copies = 4,   // the compute thread submits its layer's copies; the copy thread only records their end
    // The compute thread waits for the recorded end of copies only when it needs slots, or when the pass ends.
    late_notes = 8,
    large_batches = 16, // up to 96 matrices for a prompt's next layer are copied in one batch, instead of 8
    shared_ids = 32,    // layers whose experts are all in their own slots use the router's ids without a copy
};

constexpr uint32_t all_remedies = 1 | 2 | 4 | 8 | 16 | 32;
// All remedies except own_copies are on by default. No test on a GPU has shown that two threads may use one backend's
// stream.
constexpr uint32_t default_remedies = all_remedies & ~(uint32_t)Remedy::own_copies;

inline uint32_t read_switches() {
    const char * bits = getenv("MOEGGUF_SWITCHES");
    return bits && *bits ? (uint32_t)strtoul(bits, nullptr, 10) : default_remedies;
}

inline const uint32_t remedies_on = read_switches();

inline bool is_on(Remedy remedy) { return remedies_on & (uint32_t)remedy; }

} // namespace moegguf
