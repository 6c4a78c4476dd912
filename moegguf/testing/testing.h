// testing.h: the C ABI of the testing library: devices behind simulated links, operations that fail, and corrupted
// bookkeeping. Wheels do not contain this library; tests, tools and `bench --simulate-link` load it.
//
// Functions that return an int return a moegguf_status. After a failure, moegguf_testing_last_error() returns the
// reason. Any thread may call any function.
#pragma once

#include "moegguf.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns the reason for the failure of this thread's last call that returned a moegguf_status; empty if that call
// succeeded.
MOEGGUF_API const char * moegguf_testing_last_error(void);

// The host memory of a simulated device. NOT: it is not pinned. OWN: it is pinned. FIRST: it is the host memory of the
// first simulated device, which no other device treats as pinned, as with Vulkan.
enum moegguf_pinned { MOEGGUF_PINNED_NOT, MOEGGUF_PINNED_OWN, MOEGGUF_PINNED_FIRST };

// A simulated device for machines without a GPU (link_device.cpp). Copies to and from the device take real time.
struct moegguf_link {
    double bytes_per_ns;        // bandwidth of each direction
    double latency_ns;          // time from the beginning of a copy until its first byte can move
    uint64_t memory_bytes;      // size of the device's memory; 0: no limit
    uint64_t most_buffer_bytes; // largest buffer, and largest tensor of experts for its kernels; 0: no limit
    int32_t pinned;             // enum moegguf_pinned
    int32_t n_threads;          // number of compute threads; 0: the number that llama.cpp sets for its backends
    uint32_t strict_seed;       // not 0: a strict device (link_device.cpp), with random delays from this seed
};

// Adds a simulated device. ggml lists the device until the process ends, so models that are loaded later can use it.
// Writes ggml's name for the device to `name`; the string stays valid. INVALID: a field of `link` is out of range, or
// ggml has no CPU device.
MOEGGUF_API int moegguf_link_add(const struct moegguf_link * link, const char ** name);

// Counts of a simulated device.
struct moegguf_link_figures {
    uint64_t launches;               // number of graph launches
    uint64_t replays;                // launches that only repeated an earlier launch, like CUDA's graphs
    uint64_t copies;                 // copies that were queued in a stream
    uint64_t copies_to_host;         // copies that were queued in a stream, from the device to the host
    uint64_t launches_beside_copies; // launches while a copy in a stream was under way
    char fault[256];                 // description of the device's first fault; empty: there was none
};

// Reads the counts of a simulated device. INVALID: no simulated device has this name.
MOEGGUF_API int moegguf_link_read(const char * name, struct moegguf_link_figures * out);

enum moegguf_fault_kind {
    MOEGGUF_FAULT_OPEN,
    MOEGGUF_FAULT_READ,
    MOEGGUF_FAULT_STAT,
    MOEGGUF_FAULT_ALLOC,
    MOEGGUF_FAULT_THREAD,
    MOEGGUF_FAULT_SHORT_READ, // a read of more than 4096 bytes returns at most 4096; shorter reads are not counted
    MOEGGUF_FAULT_EINTR,
    MOEGGUF_FAULT_SLOW_READ, // a read takes 2 seconds longer, and does not fail
    MOEGGUF_FAULT_COPY,      // a copy from host memory to a device fails
    MOEGGUF_FAULT_KINDS
};

// Makes the nth operation of a kind, counted from now, fail (1: the next). If sticky is not 0, all later operations of
// the kind fail, too. nth 0 disarms the kind. sys_errno: the error number; 0: EIO. Does nothing for an unknown kind.
MOEGGUF_API void moegguf_fault_arm(int kind, uint64_t nth, int sticky, int sys_errno);

// Returns the number of operations of a kind since the kind was armed; 0 if it is not armed. If moegguf_fault_file has
// limited faults to one file, reads and fstat of other files are not counted.
MOEGGUF_API uint64_t moegguf_fault_count(int kind);

// Limits read and fstat faults to one file; NULL: faults occur for all files. INVALID: there is no such file.
MOEGGUF_API int moegguf_fault_file(const char * path);

// Slows the store's reads of a file down to the speed of a given drive. Reads share the drive's bandwidth, and each
// read takes at least the drive's latency. bytes_per_ns 0: reads are no longer slowed down. INVALID: there is no such
// file, a number is negative, or 8 other files are slowed down.
MOEGGUF_API int moegguf_drive_slow(const char * path, double bytes_per_ns, double latency_ns);

// A rule of moegguf_store_check that moegguf_corrupt() breaks.
enum moegguf_corruption {
    MOEGGUF_CORRUPT_FREE,   // a slot that holds an expert is marked as free
    MOEGGUF_CORRUPT_PINS,   // a slot has -1 pins
    MOEGGUF_CORRUPT_MAP,    // a slot and the map from experts to slots disagree
    MOEGGUF_CORRUPT_SOURCE, // a slot from which another slot is filled is marked as not pinned
};

// Breaks a rule (enum moegguf_corruption) in the bookkeeping of a store. After that, the store may only be checked and
// closed. INVALID: there is no such rule, or no slot is in a state in which the rule could be broken.
MOEGGUF_API int moegguf_corrupt(moegguf_store * store, int what);

#ifdef __cplusplus
}
#endif
