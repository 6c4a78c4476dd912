// streaming.h: experts of a prompt's layer that get no slot of their own. They pass through a few slots, matrix by
// matrix, each read once, while others are multiplied with: the prefill pipeline of DuoServe-MoE (section 5.2).
#pragma once

#include "lane.h"
#include "tier.h"

#include "ggml-cpu.h"

namespace moegguf {

// One layer of one lane at a time. All compute threads take the experts in the same order, each as index i through slot
// i % n_slots; a matrix is overwritten when every thread is past it. When the last one is done, what lies in the slots
// are whole experts, and stays there.
class Streaming {
  public:
    Streaming(const Layout & layout, Shared & shared, Tier * tier); // in the CPU's memory; nullptr: none

    void allow() { possible_ = true; } // before anything is computed: kernels ask where matrices lie
    bool possible(const Tier & tier) const { return possible_ && &tier == tier_; }

    // Under the store's lock.
    bool busy() const { return lane_ != nullptr; }
    void begin(const Lane & lane, int il, size_t first); // its absent experts, through its pinned slots from there on
    void stop(const Lane & lane);                        // it computes something else, or nothing any more
    bool next_read(Job & job);                           // the next matrix that has a place
    void arrived(const Job & job);                       // its bytes are there

    // Compute threads. serves: whether these ids are experts of the layer that is streamed.
    bool serves(const void * ids) const { return ids && ids_.load(std::memory_order_acquire) == ids; }
    int slot_of(int expert) const { return slot_of_[expert]; }                // -1: it is streamed
    int next(ggml_mul_mat_id_order * order, int n_as, uint8_t kind, int ith); // -1: no more, or they will not come
    bool all_taken(const ggml_mul_mat_id_order & order, int n_as) const {
        return order.i - n_as >= (int)experts_.size();
    }

  private:
    // One kind of matrix. Index i is held by slot i % n_slots; what comes there next is i + n_slots.
    struct Kind {
        std::unique_ptr<std::atomic<int>[]> held;   // [n_slots] the index whose matrix is there, -1: none
        std::unique_ptr<std::atomic<int>[]> n_past; // [n] threads that are past it
        int n_asked = 0;
        int n_free = 0; // every thread is past the indices below
    };

    Kind & of(uint8_t kind) { return kinds_[__builtin_ctz(kind)]; }
    bool wait(Kind & kind, int i, bool first_thread);
    void pass(Kind & kind, int i, int n_threads);
    void give_free(Kind & kind);
    void end();

    const Layout & layout_;
    Shared & shared_;
    Tier * const tier_;
    Kind kinds_[MOEGGUF_MAX_KINDS];
    bool possible_;
    bool given_up_ = false;       // by a thread: no place becomes free any more
    const Lane * lane_ = nullptr; // nullptr: nothing is streamed
    std::atomic<const void *> ids_{nullptr};
    int il_ = -1;
    uint32_t number_ = 0;      // of this layer, so that late reads of others are recognized
    std::vector<int> slots_;   // that the experts pass through
    std::vector<int> experts_; // in order
    std::vector<int> slot_of_; // [n_expert_max] of those with a slot of their own
};

} // namespace moegguf
