// switches.h: remedies for the time that a layer with slots on a device costs. Each can be switched off, so that one
// library measures each of them (docs/gpu.md, "The short run"). They change speed, and never a bit of a result.
//
// The environment variable MOEGGUF_SWITCHES holds the bits of those that are on, and is read when the library is
// loaded.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace moegguf {

enum class Remedy : uint32_t {
    quiet_copies = 1,   // the thread that copies wakes up only when something is queued for it
    pinned_ids = 2,     // ids come from a device and return to it in memory that it copies to and from by itself
    own_copies = 4,     // the thread that computes submits its layer's copies, and the other one only notes their end
    late_notes = 8,     // the computing thread waits for the end of copies where slots are needed or the pass ends only
    large_batches = 16, // up to 96 matrices for a prompt's next layer are copied as one, not 8
    shared_ids = 32,    // layers whose experts are all there multiply by the router's own ids, which nothing copies
};

constexpr uint32_t all_remedies = 1 | 2 | 4 | 8 | 16 | 32;
// All remedies but one are on by default: no card has shown yet that two threads may use one backend's stream.
constexpr uint32_t default_remedies = all_remedies & ~(uint32_t)Remedy::own_copies;

inline uint32_t read_switches() {
    const char * bits = getenv("MOEGGUF_SWITCHES");
    return bits && *bits ? (uint32_t)strtoul(bits, nullptr, 10) : default_remedies;
}

inline const uint32_t remedies_on = read_switches();

inline bool is_on(Remedy remedy) { return remedies_on & (uint32_t)remedy; }

} // namespace moegguf
