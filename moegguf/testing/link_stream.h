// link_stream.h: streams of a simulated device (link_device.cpp), which do their work in order, and the two directions
// of a link, whose copies take real time. This file knows nothing about the device or the work.
#pragma once

#include "clock.h"

#include <algorithm>
#include <deque>

namespace moegguf {

// Runs pieces of work in order, on its own thread. Other threads can wait for points in the queue, as in a GPU's
// stream.
class CommandQueue {
    struct Queue {
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<std::function<void()>> work;
        uint64_t n_pushed = 0;
        uint64_t n_done = 0;
        uint64_t n_wanted = UINT64_MAX; // number of pieces of work that may be done, counted from the first
    };

  public:
    // The point after the first n pieces of work. It may outlive the queue.
    class Point {
      public:
        Point() = default; // a point that is always reached
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

    // late: true if a piece of work begins only once a caller waits for a point after it, or this piece or a later one
    // is pushed with at_once.
    explicit CommandQueue(bool late = false) : queue_(std::make_shared<Queue>()) {
        queue_->n_wanted = late ? 0 : UINT64_MAX;
        thread_ = std::thread([this] { run(); });
    }

    // Finishes all work in the queue.
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

    // Returns the point after all work that has been pushed so far.
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

// One direction of a link, which carries one copy after another. The caller of a copy waits for it to end.
class LinkDirection {
  public:
    LinkDirection(double bytes_per_ns, double latency_ns) : bytes_per_ns_(bytes_per_ns), latency_ns_(latency_ns) {}

    // Waits until the link has carried `bytes`, and calls `copy` meanwhile. `copy` begins copy_ns (its expected time)
    // before the end, so that bytes arrive later, rather than earlier, than over a real link.
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
    // Waits until a point in time. A sleep may end late, so the last part of the wait reads the clock in a loop.
    static void wait_until(double until_ns) {
        constexpr double early_ns = 100e3;
        const double left_ns = until_ns - now_ns();
        if (left_ns > early_ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(int64_t(left_ns - early_ns))); }
        while (now_ns() < until_ns) { std::this_thread::yield(); }
    }

    const double bytes_per_ns_, latency_ns_;
    std::mutex mutex_;
    double free_ns_ = 0; // time at which the last copy ends
};

} // namespace moegguf
