// threads.h: lets a store's own threads and the threads that compute leave the processor to each other. It may start an
// OpenMP team of two threads for the process, which does nothing. Knows no store, and nothing about the work of
// threads.
#pragma once

#include "layout.h"
#include "os.h"

#include <memory>
#include <system_error>

namespace moegguf {

// Makes the calling thread run in slices of 0.1 ms. Linux from 6.12 on wakes such a thread before threads with longer
// slices. Its share of the processor does not change, and no privilege is needed. Elsewhere, and with a real-time
// policy, nothing changes.
void ask_for_short_slices();

// Starts a thread that runs in such slices. Throws Error(MEMORY) with `what` in its message if there is no thread left.
template <typename Body>
std::thread start_thread(const std::string & what, Body body) {
    try {
        return os().start_thread([body] {
            ask_for_short_slices();
            body();
        });
    } catch (const std::system_error & e) { throw Error(MOEGGUF_MEMORY, "cannot start " + what + ": " + e.what()); }
}

// While an object exists and every processor has a compute thread, compute threads spin only shortly at a barrier
// before they sleep. (GOMP_SPINCOUNT in GNU OpenMP's manual: the time for more threads than processors.) A spinning
// thread keeps a processor from readers, or shares a core with one, so that the other threads wait longer for bytes. If
// every expert is there, compute threads wait only for each other, for microseconds, and sleeping would cost more than
// it saves. Without OpenMP nothing changes. Throws Error(MEMORY) when its first thread is refused. When the second one
// is refused, OpenMP ends the process, as it does for compute threads.
class ShortSpins {
  public:
    ShortSpins();
    ~ShortSpins();

  private:
    class Team;
    std::shared_ptr<Team> team_; // one for the process
};

} // namespace moegguf
