#include "events.h"

#include <utility>

namespace moegguf {

void Events::start(const moegguf_listener & listener) {
    std::lock_guard<std::mutex> one_at_a_time(control_);
    end();
    Lock lock(mutex_);
    listener_ = listener;
    flags_ = listener.flags;
    max_input_tokens_ = listener.max_input_tokens;
    ring_.resize(capacity);
    stopping_ = false;
    thread_ = std::thread([this] { run(); });
    on_ = true;
}

void Events::stop() {
    std::lock_guard<std::mutex> one_at_a_time(control_);
    end();
}

void Events::end() {
    if (!thread_.joinable()) { return; }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        on_ = false;
        stopping_ = true;
    }
    arrived_.notify_all();
    delivered_.notify_all();
    thread_.join();
}

bool Events::has_space(size_t bytes) const { return size_ < capacity && (size_ == 0 || bytes_ + bytes <= most_bytes); }

Events::Record * Events::claim(size_t bytes, Lock & lock) {
    if (flags_ & MOEGGUF_LISTEN_EVERYTHING) {
        delivered_.wait(lock, [&] { return !on_ || has_space(bytes); });
    }
    if (!on_) { // stopped since the caller looked: this is nothing for the next listener
        return nullptr;
    }
    if (!has_space(bytes)) {
        dropped_ += 1;
        return nullptr;
    }
    Record & record = ring_[(head_ + size_++) % capacity];
    record.bytes = bytes;
    bytes_ += bytes;
    if (!(flags_ & MOEGGUF_LISTEN_LAZY) || size_ >= lazy_events || bytes_ > most_bytes / 4) { arrived_.notify_one(); }
    return &record;
}

// A record that memory does not suffice for is dropped. Under the lock that claimed it.
template <typename Copy>
void Events::fill(Record & record, Copy copy) {
    try {
        copy();
    } catch (const std::bad_alloc &) {
        size_ -= 1;
        bytes_ -= record.bytes;
        dropped_ += 1;
    }
}

void Events::tokens(const moegguf_tokens_event & event) {
    Lock lock(mutex_);
    if (!listener_.on_tokens) { return; }
    const size_t n_batched = event.sequences ? event.n_tokens : 0;
    if (Record * record = claim(sizeof(int32_t) * (event.n_tokens + 3 * n_batched), lock)) {
        fill(*record, [&] {
            record->routed = false;
            record->tokens = event;
            record->ids.assign(event.tokens, event.tokens + event.n_tokens);
            record->sequences.assign(event.sequences, event.sequences + n_batched);
            record->phases.assign(event.phases, event.phases + n_batched);
            record->outputs.assign(event.outputs, event.outputs + n_batched);
        });
    }
}

void Events::routing(const moegguf_routing_event & event) {
    const size_t n_ids = (size_t)event.n_tokens * event.n_expert_used;
    const size_t n_weights = event.weights ? n_ids : 0;
    const size_t n_inputs = event.inputs ? (size_t)event.n_tokens * event.n_embd : 0;
    Lock lock(mutex_);
    if (!listener_.on_routing) { return; }
    const size_t n_batched = event.sequences ? event.n_tokens : 0;
    const size_t bytes = sizeof(int32_t) * (n_ids + 2 * n_batched) + sizeof(float) * (n_weights + n_inputs);
    if (Record * record = claim(bytes, lock)) {
        fill(*record, [&] {
            record->routed = true;
            record->routing = event;
            record->ids.assign(event.expert_ids, event.expert_ids + n_ids);
            record->weights.assign(event.weights, event.weights + n_weights);
            record->inputs.assign(event.inputs, event.inputs + n_inputs);
            record->sequences.assign(event.sequences, event.sequences + n_batched);
            record->phases.assign(event.phases, event.phases + n_batched);
        });
    }
}

void Events::keep_step() {
    if (!on_ || !(flags_ & MOEGGUF_LISTEN_LOCKSTEP)) { return; }
    Lock lock(mutex_);
    delivered_.wait(lock, [this] { return !on_ || (size_ == 0 && !delivering_); });
}

uint64_t Events::dropped() const {
    Lock lock(mutex_);
    return dropped_;
}

void Events::run() {
    Record current;
    Lock lock(mutex_);
    while (true) {
        if (flags_ & MOEGGUF_LISTEN_LAZY) {
            while (size_ == 0 && !stopping_) { // the first events come without a notification
                arrived_.wait_for(lock, lazy_wait);
            }
        } else {
            arrived_.wait(lock, [this] { return stopping_ || size_ > 0; });
        }
        if (size_ == 0) { return; }
        std::swap(current, ring_[head_]);
        head_ = (head_ + 1) % capacity;
        size_ -= 1;
        bytes_ -= current.bytes;
        delivering_ = true;
        lock.unlock();
        deliver(current);
        if (current.inputs.capacity() > kept_floats) { current = Record(); }
        lock.lock();
        delivering_ = false;
        delivered_.notify_all();
    }
}

void Events::deliver(const Record & record) const {
    void * user = listener_.user;
    if (!record.routed) {
        moegguf_tokens_event event = record.tokens;
        event.tokens = record.ids.data();
        event.sequences = record.sequences.empty() ? nullptr : record.sequences.data();
        event.phases = record.phases.empty() ? nullptr : record.phases.data();
        event.outputs = record.outputs.empty() ? nullptr : record.outputs.data();
        listener_.on_tokens(user, &event);
    } else {
        moegguf_routing_event event = record.routing;
        event.expert_ids = record.ids.data();
        event.weights = record.weights.empty() ? nullptr : record.weights.data();
        event.inputs = record.inputs.empty() ? nullptr : record.inputs.data();
        event.sequences = record.sequences.empty() ? nullptr : record.sequences.data();
        event.phases = record.phases.empty() ? nullptr : record.phases.data();
        listener_.on_routing(user, &event);
    }
}

} // namespace moegguf
