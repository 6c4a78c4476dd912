// threads.cpp: implements threads.h: short time slices, and briefly spinning OpenMP threads.
#include "threads.h"

#include <atomic>
#include <future>
#include <mutex>

#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moegguf {

void ask_for_short_slices() {
#if defined(__linux__) && defined(SYS_sched_setattr)
    struct { // the fields of struct sched_attr in linux/sched/types.h
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
    // SCHED_FLAG_KEEP_POLICY: the thread keeps its scheduling policy, even SCHED_BATCH or SCHED_IDLE.
    constexpr uint64_t keep_policy = 0x08;
    attributes.size = sizeof(attributes);
    attributes.flags = keep_policy;
    attributes.nice = getpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid));
    attributes.runtime_ns = 100000;
    syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

// An idle OpenMP team of two threads. While the team exists and every processor has a compute thread, OpenMP has more
// threads than processors. OpenMP then lets waiting threads spin only briefly.
class ShortSpins::Team {
  public:
#ifdef _OPENMP
    ~Team() {
        stop_.set_value();
        thread_.join(); // OpenMP ends the team when this thread ends
    }

  private:
    void run() {
#pragma omp parallel num_threads(2)
        {
            // Keeps the compiler from removing the otherwise empty parallel region.
            std::atomic_signal_fence(std::memory_order_seq_cst);
        }
        stop_.get_future().wait();
    }

    std::promise<void> stop_;
    std::thread thread_{[this] { run(); }};
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
