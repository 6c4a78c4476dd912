// queues.h: what readers do next. Needed before wanted; a chunk is one matrix of one expert.
#pragma once

#include "layout.h"

#include <cstdint>
#include <vector>

namespace moegguf {

// First in, first out, without allocation once it has grown to its working size.
template <typename T>
class Ring {
  public:
    bool empty() const { return size_ == 0; }
    size_t size() const { return size_; }
    T & operator[](size_t i) { return items_[(head_ + i) % items_.size()]; }

    void push(const T & item) {
        if (size_ == items_.size()) {
            grow();
        }
        items_[(head_ + size_) % items_.size()] = item;
        size_ += 1;
    }

    T pop() {
        T item = items_[head_];
        head_ = (head_ + 1) % items_.size();
        size_ -= 1;
        return item;
    }

    // Keeps the items for which `keep` holds, in order; returns how many went.
    template <typename Keep>
    size_t filter(Keep keep) {
        size_t kept = 0;
        for (size_t i = 0; i < size_; i++) {
            if (keep((*this)[i])) {
                (*this)[kept++] = (*this)[i];
            }
        }
        const size_t gone = size_ - kept;
        size_ = kept;
        return gone;
    }

  private:
    void grow() {
        std::vector<T> larger(items_.empty() ? 256 : items_.size() * 2);
        for (size_t i = 0; i < size_; i++) {
            larger[i] = (*this)[i];
        }
        items_.swap(larger);
        head_ = 0;
    }

    std::vector<T> items_;
    size_t head_ = 0;
    size_t size_ = 0;
};

struct Job {
    int slot = -1;
    uint32_t generation = 0;
    uint8_t kinds = 0; // bits of the matrices to read, one unless chunking is off
    bool needed = false;
    uint32_t claims = 0; // of the slot, when this was queued
};

struct Wish {
    int il;
    int expert;
};

} // namespace moegguf
