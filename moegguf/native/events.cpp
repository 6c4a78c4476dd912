// events.cpp: implements events.h: the ring of records and the thread that calls the listener.
#include "events.h"

#include <algorithm>
#include <type_traits>
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

bool Events::has_space(size_t n_words) const {
    return size_ < capacity && (size_ == 0 || n_words_ + n_words <= most_words);
}

// Copies an event and the arrays that it points to into the ring. Does nothing if the listener has no callback for the
// event. If the ring is full, the event is dropped, or the call waits (MOEGGUF_LISTEN_EVERYTHING). An event is also
// dropped if memory runs out.
template <typename Event>
void Events::post(Event & event, Event Record::* kind, std::initializer_list<Array> arrays) {
    constexpr bool routed = std::is_same_v<Event, moegguf_routing_event>;
    size_t n_words = 0;
    for (const Array & array : arrays) { n_words += *array.pointer ? array.n : 0; }
    Lock lock(mutex_);
    if (routed ? !listener_.on_routing : !listener_.on_tokens) { return; }
    if (flags_ & MOEGGUF_LISTEN_EVERYTHING) {
        delivered_.wait(lock, [&] { return !on_ || has_space(n_words); });
    }
    if (!on_) { // the listener was stopped in the meantime, and the next one must not get this event
        return;
    }
    Record & record = ring_[(head_ + size_) % capacity];
    bool fits = has_space(n_words);
    try {
        if (fits) { record.words.resize(n_words); }
    } catch (const std::bad_alloc &) { fits = false; }
    if (!fits) {
        dropped_ += 1;
        return;
    }
    int32_t * at = record.words.data();
    for (const Array & array : arrays) {
        if (!*array.pointer) { continue; }
        std::copy_n((const char *)*array.pointer, array.n * sizeof(*at), (char *)at);
        *array.pointer = at;
        at += array.n;
    }
    record.routed = routed;
    record.*kind = event;
    size_ += 1;
    n_words_ += n_words;
    if (!(flags_ & MOEGGUF_LISTEN_LAZY) || size_ >= lazy_events || n_words_ > most_words / 4) { arrived_.notify_one(); }
}

void Events::tokens(moegguf_tokens_event event) {
    const size_t n = event.n_tokens;
    post(event, &Record::tokens,
         {{(const void **)&event.tokens, n},
          {(const void **)&event.sequences, n},
          {(const void **)&event.phases, n},
          {(const void **)&event.outputs, n}});
}

void Events::routing(moegguf_routing_event event) {
    const size_t n = event.n_tokens, n_ids = n * event.n_expert_used;
    post(event, &Record::routing,
         {{(const void **)&event.expert_ids, n_ids},
          {(const void **)&event.weights, n_ids},
          {(const void **)&event.inputs, n * event.n_embd},
          {(const void **)&event.sequences, n},
          {(const void **)&event.phases, n}});
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
            while (size_ == 0 && !stopping_) { // post() does not wake a lazy listener for a few events
                arrived_.wait_for(lock, lazy_wait);
            }
        } else {
            arrived_.wait(lock, [this] { return stopping_ || size_ > 0; });
        }
        if (size_ == 0) { return; }
        std::swap(current, ring_[head_]);
        head_ = (head_ + 1) % capacity;
        size_ -= 1;
        n_words_ -= current.words.size();
        delivering_ = true;
        lock.unlock();
        if (current.routed) {
            listener_.on_routing(listener_.user, &current.routing);
        } else {
            listener_.on_tokens(listener_.user, &current.tokens);
        }
        if (current.words.capacity() > kept_words) { current = Record(); }
        lock.lock();
        delivering_ = false;
        delivered_.notify_all();
    }
}

} // namespace moegguf
