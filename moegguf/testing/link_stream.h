// link_stream.h: the streams of a simulated device (link_device.cpp), in which work is done in order, and the two
// directions of a link in real time. Knows no device, and nothing about the work.
#pragma once

#include "clock.h"

#include <algorithm>
#include <deque>

namespace moegguf {

// Work done in order on a thread of its own, and points in it to wait for, as a GPU's stream has them.
class CommandQueue {
    struct Queue {
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<std::function<void()>> work;
        uint64_t n_pushed = 0;
        uint64_t n_done = 0;
        uint64_t n_wanted = UINT64_MAX; // pieces of work that may be done
    };

  public:
    // The point after the first n pieces of work. It may outlive the queue.
    class Point {
      public:
        Point() = default; // nothing to wait for
        Point(std::shared_ptr<Queue> queue, uint64_t n) : queue_(std::move(queue)), n_(n) {}

        void wait() const {
            if (!queue_) { return; }
            std::unique_lock<std::mutex> lock(queue_->mutex);
            queue_->n_wanted = std::max(queue_->n_wanted, n_);
            queue_->changed.notify_all();
            queue_->changed.wait(lock, [this] { return queue_->n_done >= n_; });
        }

      private:
        std::shared_ptr<Queue> queue_;
        uint64_t n_ = 0;
    };

    // late: nothing is done before somebody waits for a point behind it, or work is pushed that begins at once.
    explicit CommandQueue(bool late = false) : queue_(std::make_shared<Queue>()) {
        queue_->n_wanted = late ? 0 : UINT64_MAX;
        thread_ = std::thread([this] { run(); });
    }

    // Does what was pushed before.
    ~CommandQueue() {
        push(nullptr);
        {
            std::lock_guard<std::mutex> lock(queue_->mutex);
            queue_->n_wanted = UINT64_MAX;
        }
        queue_->changed.notify_all();
        thread_.join();
    }

    void push(std::function<void()> work, bool at_once = false) {
        std::lock_guard<std::mutex> lock(queue_->mutex);
        queue_->work.push_back(std::move(work));
        queue_->n_pushed += 1;
        if (at_once) { queue_->n_wanted = std::max(queue_->n_wanted, queue_->n_pushed); }
        queue_->changed.notify_all();
    }

    // Returns the point after everything pushed so far.
    Point mark() const {
        std::lock_guard<std::mutex> lock(queue_->mutex);
        return {queue_, queue_->n_pushed};
    }

  private:
    void run() {
        Queue & queue = *queue_;
        std::unique_lock<std::mutex> lock(queue.mutex);
        while (true) {
            queue.changed.wait(lock, [&] { return !queue.work.empty() && queue.n_done < queue.n_wanted; });
            const std::function<void()> work = std::move(queue.work.front());
            queue.work.pop_front();
            if (!work) { return; }
            lock.unlock();
            work();
            lock.lock();
            queue.n_done += 1;
            queue.changed.notify_all();
        }
    }

    std::shared_ptr<Queue> queue_;
    std::thread thread_;
};

// One direction of a link, which carries one copy after another. It may keep a caller waiting.
class LinkDirection {
  public:
    LinkDirection(double bytes_per_ns, double latency_ns) : bytes_per_ns_(bytes_per_ns), latency_ns_(latency_ns) {}

    // Returns when `bytes` have come through, and runs `copy` meanwhile. `copy` begins as late as its own time,
    // `copy_ns`, allows, so that no byte is there before the link has brought it.
    template <typename Copy>
    void transfer(double bytes, double copy_ns, Copy && copy) {
        std::unique_lock<std::mutex> lock(mutex_);
        const double end_ns = std::max(now_ns() + latency_ns_, free_ns_) + bytes / bytes_per_ns_;
        free_ns_ = end_ns;
        lock.unlock();
        wait_until(end_ns - copy_ns);
        copy();
        wait_until(end_ns);
    }

  private:
    // The clock of this thread wakes up some 60 us late: the rest is spent looking at it.
    static void wait_until(double until_ns) {
        constexpr double early_ns = 100e3;
        const double left_ns = until_ns - now_ns();
        if (left_ns > early_ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(int64_t(left_ns - early_ns))); }
        while (now_ns() < until_ns) { std::this_thread::yield(); }
    }

    const double bytes_per_ns_, latency_ns_;
    std::mutex mutex_;
    double free_ns_ = 0; // when the last copy ends
};

} // namespace moegguf
