// threads.h: a store's own threads and those that compute leave the processor to each other. It may start one thread
// for the process, which does nothing. Knows nothing of what threads do, and no store.
#pragma once

#include "layout.h"
#include "os.h"

#include <memory>
#include <system_error>

namespace moegguf {

// The calling thread runs in slices of 0.1 ms, for which Linux from 6.12 on wakes it before threads with longer ones;
// its share of the processor stays what it was, and needs no privilege. Elsewhere, and with a real-time policy, nothing
// changes.
void ask_for_short_slices();

// A thread that runs in such slices. what: for the message of the Error(MEMORY) that is thrown where there is none.
template <typename Body>
std::thread start_thread(const std::string & what, Body body) {
    try {
        return os().start_thread([body] {
            ask_for_short_slices();
            body();
        });
    } catch (const std::system_error & e) { throw Error(MOEGGUF_MEMORY, "cannot start " + what + ": " + e.what()); }
}

// While one exists and every processor has a compute thread, these spin for GNU OpenMP's short time at a barrier before
// they sleep (GOMP_SPINCOUNT in its manual: more threads than processors). A thread that spins keeps a processor from
// readers, or shares a core with one, and its partner waits the longer for bytes. Where every expert is there, they
// wait for each other only, for microseconds, and sleeping would cost more than it saves. Without OpenMP, nothing
// changes. Throws Error(MEMORY) where its first thread is refused; where the second is, OpenMP ends the process, as it
// does for compute threads.
class ShortSpins {
  public:
    ShortSpins();
    ~ShortSpins();

  private:
    class Team;
    std::shared_ptr<Team> team_; // one for the process
};

} // namespace moegguf
