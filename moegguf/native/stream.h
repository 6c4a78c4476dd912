// stream.h: work done in order on a thread of its own, and points in it to wait for, as a GPU's stream has them.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace moegguf {

// Reached once, for good.
class Point {
  public:
    void reach() {
        std::lock_guard<std::mutex> lock(mutex_);
        reached_ = true;
        changed_.notify_all();
    }

    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return reached_; });
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool reached_ = false;
};

class Stream {
  public:
    Stream() : thread_([this] { run(); }) {}

    // Does what was pushed before.
    ~Stream() {
        push(nullptr);
        thread_.join();
    }

    void push(std::function<void()> work) {
        std::lock_guard<std::mutex> lock(mutex_);
        work_.push_back(std::move(work));
        pushed_.notify_one();
    }

    // Behind everything pushed so far.
    std::shared_ptr<Point> mark() {
        auto point = std::make_shared<Point>();
        push([point] { point->reach(); });
        return point;
    }

  private:
    void run() {
        while (std::function<void()> work = next()) {
            work();
        }
    }

    std::function<void()> next() {
        std::unique_lock<std::mutex> lock(mutex_);
        pushed_.wait(lock, [this] { return !work_.empty(); });
        std::function<void()> work = std::move(work_.front());
        work_.pop_front();
        return work;
    }

    std::mutex mutex_;
    std::condition_variable pushed_;
    std::deque<std::function<void()>> work_;
    std::thread thread_; // last: it uses the others
};

} // namespace moegguf
