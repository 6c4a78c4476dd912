// link_stream.h: what a simulated device has beside memory (link_device.cpp): streams, in which work is done in order,
// and the two directions of a link in real time. Knows no device, and not what the work is.
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
        uint64_t n_wanted = UINT64_MAX; // that may be done
    };

  public:
    // Behind the first n pieces of work; may outlive the queue.
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

    // late: nothing is done before somebody waits for a point behind it.
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

    void push(std::function<void()> work) {
        std::lock_guard<std::mutex> lock(queue_->mutex);
        queue_->work.push_back(std::move(work));
        queue_->n_pushed += 1;
        queue_->changed.notify_all();
    }

    // Behind everything pushed so far.
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

// One direction of a link, whose bandwidth all copies under way share equally. It may keep a caller waiting.
class SharedBandwidth {
  public:
    SharedBandwidth(double bytes_per_ns, double latency_ns) : bytes_per_ns_(bytes_per_ns), latency_ns_(latency_ns) {}

    // Returns when `bytes` have come through, and runs `copy` meanwhile: as late as its own time, `copy_ns`, allows, so
    // that nobody finds bytes there that the link has not brought yet.
    template <typename Copy>
    void transfer(double bytes, double copy_ns, Copy && copy) {
        wait_until(now_ns() + latency_ns_);
        std::unique_lock<std::mutex> lock(mutex_);
        advance();
        const double end = served_ + bytes; // of what every copy gets
        n_copies_++;
        changed_.notify_all();
        wait_served(lock, end, copy_ns);
        lock.unlock();
        copy();
        lock.lock();
        wait_served(lock, end, 0);
        n_copies_--;
        changed_.notify_all();
    }

  private:
    // The clock of this thread wakes up some 60 us late: the rest is spent looking at it.
    static constexpr double early_ns = 100e3;

    static void wait_until(double until_ns) {
        const double left_ns = until_ns - now_ns();
        if (left_ns > early_ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(int64_t(left_ns - early_ns))); }
        while (now_ns() < until_ns) { std::this_thread::yield(); }
    }

    // Until less than `rest_ns` are missing at the present speed.
    void wait_served(std::unique_lock<std::mutex> & lock, double end, double rest_ns) {
        while (true) {
            advance();
            const double left_ns = (end - served_) * n_copies_ / bytes_per_ns_ - rest_ns;
            if (left_ns <= 0) { return; }
            if (left_ns > early_ns) {
                changed_.wait_for(lock, std::chrono::nanoseconds(int64_t(left_ns - early_ns)));
            } else {
                lock.unlock();
                std::this_thread::yield();
                lock.lock();
            }
        }
    }

    void advance() {
        const uint64_t now = now_ns();
        served_ += (now - at_ns_) * bytes_per_ns_ / std::max(1, n_copies_);
        at_ns_ = now;
    }

    const double bytes_per_ns_, latency_ns_;
    std::mutex mutex_;
    std::condition_variable changed_; // how many share the bandwidth
    int n_copies_ = 0;
    double served_ = 0; // bytes that a copy under way since the beginning would have got
    uint64_t at_ns_ = now_ns();
};

} // namespace moegguf
