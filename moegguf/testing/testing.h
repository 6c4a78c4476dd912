// testing.h: the C ABI of the testing library: devices behind simulated links, operations that fail, and bookkeeping
// that is wrong. Wheels do not contain this library; tests, tools and `bench --simulate-link` load it.
//
// Calls that return an int return a moegguf_status and leave the reason in moegguf_testing_last_error(). Any thread may
// make every call.
#pragma once

#include "moegguf.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns why the last call of this thread failed; empty after one that succeeded.
MOEGGUF_API const char * moegguf_testing_last_error(void);

// Host memory of a simulated device: not pinned; pinned; or the host memory of the first simulated device, which is
// pinned for the first one alone, as with Vulkan.
enum moegguf_pinned { MOEGGUF_PINNED_NOT, MOEGGUF_PINNED_OWN, MOEGGUF_PINNED_FIRST };

// A device behind a link in real time (link_device.cpp), for machines without one.
struct moegguf_link {
    double bytes_per_ns;        // bandwidth of each direction
    double latency_ns;          // latency of each copy
    uint64_t memory_bytes;      // memory of the device; 0: without a limit
    uint64_t most_buffer_bytes; // size of one buffer, and of experts that its kernels take; 0: without a limit
    int32_t pinned;             // enum moegguf_pinned
    int32_t n_threads;          // threads that compute; 0: the number that llama.cpp sets for the CPU
    uint32_t strict_seed;       // not 0: as hard on its users as CUDA (link_device.cpp), with delays by this seed
};

// Adds a simulated device, which ggml knows until the process ends, so that models loaded later can lie on it. Writes
// ggml's name of the device, which stays valid, to `name`. INVALID: a field of `link` is out of range.
MOEGGUF_API int moegguf_link_add(const struct moegguf_link * link, const char ** name);

// Counts of a simulated device.
struct moegguf_link_figures {
    uint64_t launches;               // launches of graphs
    uint64_t replays;                // launches that repeated an earlier one, as CUDA's graphs do
    uint64_t copies;                 // copies that went on after the call for them
    uint64_t launches_beside_copies; // launches while such a copy was under way
    char fault[256];                 // the first call to a strict device that CUDA may not bear; empty: none
};

// Reads them. INVALID: no simulated device has this name.
MOEGGUF_API int moegguf_link_read(const char * name, struct moegguf_link_figures * out);

enum moegguf_fault_kind {
    MOEGGUF_FAULT_OPEN,
    MOEGGUF_FAULT_READ,
    MOEGGUF_FAULT_STAT,
    MOEGGUF_FAULT_ALLOC,
    MOEGGUF_FAULT_THREAD,
    MOEGGUF_FAULT_SHORT_READ, // a read returns 4096 bytes
    MOEGGUF_FAULT_EINTR,
    MOEGGUF_FAULT_SLOW_READ, // a read takes 2 seconds longer
    MOEGGUF_FAULT_COPY,      // a copy from host memory to a device fails
    MOEGGUF_FAULT_KINDS
};

// Makes the nth operation of a kind from now on fail (1: the next). If sticky is not 0, all later operations fail, too.
// nth 0 disarms the kind. sys_errno: the error number; 0: EIO.
MOEGGUF_API void moegguf_fault_arm(int kind, uint64_t nth, int sticky, int sys_errno);

// Returns how many operations of a kind came while it was armed.
MOEGGUF_API uint64_t moegguf_fault_count(int kind);

// A rule of moegguf_store_check that is to be broken.
enum moegguf_corruption {
    MOEGGUF_CORRUPT_FREE,   // an expert's slot is called free
    MOEGGUF_CORRUPT_PINS,   // a slot has -1 pins
    MOEGGUF_CORRUPT_MAP,    // a slot holds another expert than the map says
    MOEGGUF_CORRUPT_SOURCE, // a slot that another is filled from is not pinned
};

// Breaks a rule in the bookkeeping of a store. The store may then only be checked and closed.
// INVALID: no slot is in a state in which the rule could be broken.
MOEGGUF_API int moegguf_corrupt(moegguf_store * store, int what);

#ifdef __cplusplus
}
#endif
