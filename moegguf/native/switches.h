// switches.h: the remedies. A remedy is an optimisation that can be switched on or off, so that its effect can be
// measured with one build of the library (docs/gpu.md, "The short run"). Remedies affect only speed, and never change a
// single bit of any result.
//
// The environment variable MOEGGUF_SWITCHES is the decimal sum of the bits of the remedies that are on. It is read when
// the library is loaded. If it is unset or empty, default_remedies are on.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace moegguf {

enum class Remedy : uint32_t {
    quiet_copies = 1, // a layer's demands wake the copy thread only if a copy is queued
    pinned_ids = 2,   // expert ids are copied to and from a device through pinned host memory
    // The compute thread may itself submit the copies that its layer demands; the copy thread then only records their
    // completion.
    own_copies = 4,
    // The compute thread does not wait at each layer until the copy thread has recorded the end of the layer's copies.
    // It waits when it needs slots, when a second layer has unrecorded copies, or when the pass ends.
    late_notes = 8,
    large_batches = 16, // up to 96 matrices for a prompt's next layer are copied in one batch; off: up to 8
    // Layers multiply by the router's own ids, without a copy of the ids, if every expert of their tier is in its own
    // slot and no listener needs routing events.
    shared_ids = 32,
    // The graph of a layer on a device computes the scores of the next layers' routers for the predictor `skip`. The
    // scores are copied with the expert ids. Off: the layer's router input is copied, and the predictor's thread
    // computes the scores.
    graph_scores = 64,
    // Layers with larger experts than other layers have slots of their own size on a device. moegguf/engine/solver.py
    // plans these slots; the library itself does not read this bit.
    size_classes = 128,
    // The matrices of an expert lie one after another in its slot, on a device and in the slots in RAM below it, so
    // that one copy moves an expert. Off: each kind of matrix has an arena of its own, and each matrix is copied
    // separately.
    one_arena = 256,
    // A layer on a CUDA card computes up to as many tokens at a time as the card's kernels multiply each on its own,
    // mostly 8. Off: up to 4.
    wide_windows = 512,
};

constexpr uint32_t all_remedies = 1 | 2 | 4 | 8 | 16 | 32 | 64 | 128 | 256 | 512;
// All remedies except own_copies, graph_scores and one_arena are on by default. With own_copies, two threads use one
// backend's stream, and no test on a GPU has shown that this is safe. With graph_scores and with one_arena, a simulated
// device was not faster (docs/gpu.md).
constexpr uint32_t default_remedies =
    all_remedies & ~((uint32_t)Remedy::own_copies | (uint32_t)Remedy::graph_scores | (uint32_t)Remedy::one_arena);

inline uint32_t read_switches() {
    const char * bits = getenv("MOEGGUF_SWITCHES");
    return bits && *bits ? (uint32_t)strtoul(bits, nullptr, 10) : default_remedies;
}

inline const uint32_t remedies_on = read_switches();

inline bool is_on(Remedy remedy) { return remedies_on & (uint32_t)remedy; }

} // namespace moegguf
