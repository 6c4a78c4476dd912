// link.h: the modelled link of simulation mode: one transfer at a time, latency plus bytes over bandwidth.
#pragma once

#include "queues.h"

namespace moegguf {

struct ModelledLink {
    double bytes_per_ns = 0; // 0: transfers are free
    double latency_ns = 0;
    bool busy = false;
    Job job;
    uint64_t done_ns = 0;

    void start(const Job & next, uint64_t bytes, uint64_t clock_ns) {
        job = next;
        busy = true;
        done_ns = clock_ns + (bytes_per_ns > 0 ? uint64_t(latency_ns + bytes / bytes_per_ns) : 0);
    }
};

} // namespace moegguf
