// queues.h: transfers to be made, as data; a chunk is one matrix of one expert. Knows no threads and no links.
#pragma once

#include "counters.h"
#include "layout.h"

#include <cstdint>
#include <vector>

namespace moegguf {

// First in, first out, without allocation once it has grown to its working size.
template <typename T>
class Ring {
  public:
    bool empty() const { return size_ == 0; }
    size_t size() const { return get(size_); } // any thread
    T & operator[](size_t i) { return items_[(head_ + i) & (items_.size() - 1)]; }

    T & add() { // holds an earlier item until it is written to
        if (size_ == items_.size()) { grow(); }
        T & item = (*this)[size_];
        set_gauge(size_, size_ + 1);
        return item;
    }

    void push(const T & item) { add() = item; }

    T pop() {
        T item = items_[head_];
        head_ = (head_ + 1) & (items_.size() - 1);
        set_gauge(size_, size_ - 1);
        return item;
    }

    void clear() { set_gauge(size_, 0); }

    // Keeps the items for which `keep` holds, in order; returns how many went.
    template <typename Keep>
    size_t filter(Keep keep) {
        size_t kept = 0;
        for (size_t i = 0; i < size_; i++) {
            if (keep((*this)[i])) { (*this)[kept++] = (*this)[i]; }
        }
        const size_t gone = size_ - kept;
        set_gauge(size_, kept);
        return gone;
    }

  private:
    void grow() {
        std::vector<T> larger(items_.empty() ? 256 : items_.size() * 2);
        for (size_t i = 0; i < size_; i++) { larger[i] = (*this)[i]; }
        items_.swap(larger);
        head_ = 0;
    }

    std::vector<T> items_; // [a power of two]
    size_t head_ = 0;
    uint64_t size_ = 0;
};

// Disk is where every expert lies: the shards of the GGUF. The others have slots: those that layers compute with, those
// in RAM that slots of a device are filled from, and those of tensors that prompts are staged in.
enum class TierId : uint8_t { disk, ram, compute, staging };

// An expert's slot, while the slot's generation holds. On disk the layout has its offsets, and slot is -1.
struct SlotRef {
    TierId tier = TierId::disk;
    int slot = -1;
    uint32_t generation = 0;
};

struct Job {
    SlotRef source;
    SlotRef destination;
    int il = -1;
    int expert = -1;
    uint8_t kinds = 0;     // bits of the matrices to move, one unless chunking is off
    bool demand = false;   // a routing event needs it; a prefetch otherwise
    uint32_t requests = 0; // of the destination, when this was queued
    uint64_t bytes = 0;    // of these matrices, as begun_ns from its beginning on
    uint64_t begun_ns = 0;
    int streamed = -1; // its index among the experts that are streamed; -1: the slot's own expert
};

// Who wants an expert before a layer needs it, in the order in which they are served.
enum class Cause : uint8_t { request, forecast, warm_start };

// An expert that is worth having: transferred only while the link has nothing that is needed now, in place of one that
// is worth less. What a request is worth is said by the eviction policy; a warm start takes free slots only.
struct Want {
    int il;
    int expert;
    Cause cause = Cause::request;
    float value = 0;                // of a forecast: of having it, as a chance
    uint64_t deadline = UINT64_MAX; // of a forecast: the layer step (LayerStep) that uses it; too late from then on
};

} // namespace moegguf
