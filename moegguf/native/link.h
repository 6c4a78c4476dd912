// link.h: a link into slots: which transfer comes next, and what follows when one has ended.
//
// A clock carries its transfers (clock.h): in real time by the link's own threads, in virtual time one after another.
// Knows slots by name only.
#pragma once

#include "queues.h"

#include <string>

namespace moegguf {

class Link {
  public:
    virtual ~Link() = default;

    virtual void start_threads() = 0; // which carry transfers from now on. Throws Error.

    // Under the store's lock.
    virtual bool begin_next(Job & job) = 0; // the next transfer that is still of use; false: there is none
    virtual void finish(const Job & job, const std::string & why) = 0; // why it failed; empty: the bytes are there
    // Virtual time: what goes over the link, 0 where that takes no time; and how long it will take.
    virtual uint64_t link_bytes(const Job & job) const = 0;
    virtual void note_time(const Job & job, uint64_t ns) = 0;
};

struct LinkSpeed {
    double bytes_per_ns = 0; // 0: transfers are free
    double latency_ns = 0;   // of each
};

} // namespace moegguf
