// threads.h: settings that help a store's own threads and the compute threads share processors. ShortSpins may start an
// idle OpenMP team of two threads for the process. This file knows nothing about stores or about the work that threads
// do.
#pragma once

#include "layout.h"
#include "os.h"

#include <memory>
#include <system_error>

namespace moegguf {

// Requests time slices of 0.1 ms for the calling thread. When such a thread wakes up, Linux 6.12 and later runs it
// before threads with longer slices. The thread's share of the processor does not change, and no privilege is needed.
// On other systems, and for real-time threads, nothing changes.
void ask_for_short_slices();

// Starts a thread that runs in short slices. Throws Error(MEMORY), with `what` in the message, if the system refuses a
// thread.
template <typename Body>
std::thread start_thread(const std::string & what, Body body) {
    try {
        return os().start_thread([body] {
            ask_for_short_slices();
            body();
        });
    } catch (const std::system_error & e) { throw Error(MOEGGUF_MEMORY, "cannot start " + what + ": " + e.what()); }
}

// While an object of this class exists and every processor has a compute thread, OpenMP has more threads than
// processors. Compute threads then spin only briefly at a barrier before they sleep (GNU OpenMP manual,
// GOMP_SPINCOUNT).
//
// This helps while experts are read, because a spinning thread takes CPU time from reader threads. A tier with a slot
// for every expert creates no such object. Its compute threads wait only for each other, for microseconds, and sleeping
// would take longer than spinning. In a build without OpenMP, this class does nothing.
//
// The constructor throws Error(MEMORY) if the team's first thread is refused. If the second thread is refused, OpenMP
// terminates the process, as it does for compute threads.
class ShortSpins {
  public:
    ShortSpins();
    ~ShortSpins();

  private:
    class Team;
    std::shared_ptr<Team> team_; // shared by all objects of the process
};

} // namespace moegguf
