// short_spins.h: compute threads that wait for each other leave the processor sooner to those that read.
// It may start one thread for the process, which does nothing. Knows no store.
#pragma once

#include <memory>

namespace moegguf {

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
    ShortSpins(const ShortSpins &) = delete;
    ShortSpins & operator=(const ShortSpins &) = delete;

  private:
    class Team;
    std::shared_ptr<Team> team_; // one for the process
};

} // namespace moegguf
