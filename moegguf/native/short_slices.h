// short_slices.h: threads that work for some microseconds at a time and must not wait behind those that compute.
// Knows nothing of what they do.
#pragma once

#include "fault.h"
#include "layout.h"

#include <cerrno>
#include <cstdint>
#include <system_error>
#include <thread>

#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moegguf {

// The calling thread runs in slices of 0.1 ms, for which Linux from 6.12 on wakes it before threads with longer ones;
// its share of the processor stays what it was, and needs no privilege. Elsewhere, and with a real-time policy, nothing
// changes.
inline void ask_for_short_slices() {
#if defined(__linux__) && defined(SYS_sched_setattr)
    struct { // struct sched_attr, linux/sched/types.h
        uint32_t size;
        uint32_t policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime_ns;
        uint64_t deadline_ns;
        uint64_t period_ns;
    } attributes = {};
    static_assert(sizeof(attributes) == 48, "SCHED_ATTR_SIZE_VER0");
    constexpr uint64_t keep_policy = 0x08; // SCHED_FLAG_KEEP_POLICY: SCHED_BATCH and SCHED_IDLE, too
    attributes.size = sizeof(attributes);
    attributes.flags = keep_policy;
    attributes.nice = getpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid));
    attributes.runtime_ns = 100000;
    syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

// A thread that runs in such slices. what: for the message of the Error(MEMORY) that is thrown where there is none.
template <typename Body>
std::thread start_thread(const std::string & what, Body body) {
    try {
        if (fault(MOEGGUF_FAULT_THREAD)) {
            throw std::system_error(errno, std::generic_category());
        }
        return std::thread([body] {
            ask_for_short_slices();
            body();
        });
    } catch (const std::system_error & e) {
        throw Error(MOEGGUF_MEMORY, "cannot start " + what + ": " + e.what());
    }
}

} // namespace moegguf
