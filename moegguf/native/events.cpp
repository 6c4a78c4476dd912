#include "events.h"

namespace moegguf {

void Events::start(const moegguf_listener & listener) {
    stop();
    listener_ = listener;
    ring_.resize(capacity);
    stopping_ = false;
    thread_ = std::thread([this] { run(); });
    on_ = true;
}

void Events::stop() {
    if (!thread_.joinable()) {
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        on_ = false;
        stopping_ = true;
    }
    arrived_.notify_all();
    thread_.join();
}

Events::Record * Events::claim() {
    if (!on_) { // stopped since the caller looked: the next listener must not hear of it
        return nullptr;
    }
    if (size_ == capacity) {
        dropped_ += 1;
        return nullptr;
    }
    return &ring_[(head_ + size_++) % capacity];
}

void Events::gate(const moegguf_gate_event & event) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Record * record = claim()) {
        record->is_gate = true;
        record->gate = event;
        record->ids.assign(event.expert_ids, event.expert_ids + (size_t)event.n_tokens * event.n_expert_used);
        arrived_.notify_one();
    }
}

void Events::residency(const moegguf_residency_event & event) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Record * record = claim()) {
        record->is_gate = false;
        record->residency = event;
        arrived_.notify_one();
    }
}

uint64_t Events::dropped() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return dropped_;
}

void Events::run() {
    Record current;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        arrived_.wait(lock, [this] { return stopping_ || size_ > 0; });
        if (size_ == 0) {
            return;
        }
        std::swap(current, ring_[head_]);
        head_ = (head_ + 1) % capacity;
        size_ -= 1;
        lock.unlock();
        deliver(current);
        lock.lock();
    }
}

void Events::deliver(const Record & record) const {
    if (record.is_gate && listener_.on_gate) {
        moegguf_gate_event event = record.gate;
        event.expert_ids = record.ids.data();
        listener_.on_gate(listener_.user, &event);
    } else if (!record.is_gate && listener_.on_residency) {
        listener_.on_residency(listener_.user, &record.residency);
    }
}

} // namespace moegguf
