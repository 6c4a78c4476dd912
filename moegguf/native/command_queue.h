// command_queue.h: work done in order on a thread of its own, and points in it to wait for, as a GPU's stream has them.
// Knows nothing of what the work is.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace moegguf {

class CommandQueue {
    struct Queue {
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<std::function<void()>> work;
        uint64_t n_pushed = 0;
        uint64_t n_taken = 0;
        uint64_t n_wanted = UINT64_MAX; // that may be taken

        void want(uint64_t n) {
            std::lock_guard<std::mutex> lock(mutex);
            n_wanted = std::max(n_wanted, n);
            changed.notify_all();
        }

        uint64_t push(std::function<void()> one) {
            std::lock_guard<std::mutex> lock(mutex);
            work.push_back(std::move(one));
            changed.notify_all();
            return ++n_pushed;
        }

        std::function<void()> next() {
            std::unique_lock<std::mutex> lock(mutex);
            changed.wait(lock, [this] { return !work.empty() && n_taken < n_wanted; });
            n_taken += 1;
            std::function<void()> one = std::move(work.front());
            work.pop_front();
            return one;
        }
    };

  public:
    // Reached once, for good.
    class Point {
      public:
        void wait() {
            std::unique_lock<std::mutex> lock(mutex_);
            if (!reached_ && queue_) {
                lock.unlock();
                queue_->want(n_);
                lock.lock();
            }
            changed_.wait(lock, [this] { return reached_; });
        }

      private:
        friend class CommandQueue;

        void reach() {
            std::lock_guard<std::mutex> lock(mutex_);
            reached_ = true;
            changed_.notify_all();
        }

        std::mutex mutex_;
        std::condition_variable changed_;
        bool reached_ = false;
        std::shared_ptr<Queue> queue_;
        uint64_t n_ = 0; // that have to be taken before it
    };

    // late: nothing is done before somebody waits for a point behind it.
    explicit CommandQueue(bool late = false) : queue_(std::make_shared<Queue>()) {
        queue_->n_wanted = late ? 0 : UINT64_MAX;
        thread_ = std::thread([this] { run(); });
    }

    // Does what was pushed before.
    ~CommandQueue() {
        push(nullptr);
        queue_->want(UINT64_MAX);
        thread_.join();
    }

    void push(std::function<void()> work) { queue_->push(std::move(work)); }

    // Behind everything pushed so far.
    std::shared_ptr<Point> mark() {
        auto point = std::make_shared<Point>();
        std::lock_guard<std::mutex> lock(point->mutex_);
        point->n_ = queue_->push([point] { point->reach(); });
        point->queue_ = queue_;
        return point;
    }

  private:
    void run() {
        while (std::function<void()> work = queue_->next()) {
            work();
        }
    }

    std::shared_ptr<Queue> queue_; // points that outlive the stream know it
    std::thread thread_;
};

} // namespace moegguf
