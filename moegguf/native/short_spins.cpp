#include "short_spins.h"

#include "layout.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace moegguf {

// An OpenMP thread that does nothing: with one for each processor that computes, these are more than there are.
class ShortSpins::Team {
  public:
#ifdef _OPENMP
    Team() : thread_([this] { run(); }) {}

    ~Team() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        stop_.notify_one();
        thread_.join(); // which ends its team
    }

  private:
    void run() {
#pragma omp parallel num_threads(2)
        {
            std::atomic_signal_fence(std::memory_order_seq_cst); // compilers leave out what does nothing
        }
        std::unique_lock<std::mutex> lock(mutex_);
        stop_.wait(lock, [this] { return stopping_; });
    }

    std::mutex mutex_;
    std::condition_variable stop_;
    bool stopping_ = false;
    std::thread thread_;
#endif
};

ShortSpins::ShortSpins() {
    static std::mutex mutex;
    static std::weak_ptr<Team> shared;
    std::lock_guard<std::mutex> lock(mutex);
    team_ = shared.lock();
    if (!team_) {
        try {
            team_ = std::make_shared<Team>();
        } catch (const std::system_error & e) {
            throw Error(MOEGGUF_MEMORY, std::string("cannot start a thread: ") + e.what());
        }
        shared = team_;
    }
}

ShortSpins::~ShortSpins() = default;

} // namespace moegguf
