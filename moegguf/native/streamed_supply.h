// streamed_supply.h: experts of a prompt's layer that do not fit the slots, in the CPU's memory. They pass through a
// few slots, matrix by matrix, each read once, while others are multiplied with: the prefill pipeline of DuoServe-MoE
// (section 5.2).
//
// It may pin and take slots of the CPU's tier, tells readers what to read next, and kernels which matrix to take,
// streamed or not. What is in the slots when the layer ends stays there as whole experts.
#pragma once

#include "supply.h"

#include "ggml-cpu.h"

namespace moegguf {

// One layer at a time. All compute threads take the experts in the same order, each as index i through
// slot i % n_slots; a matrix is overwritten when every thread is past it.
class StreamedSupply final : public Supply, private StreamedReads {
  public:
    // tier: in the CPU's memory; nullptr: none.
    StreamedSupply(const Layout & layout, Shared & shared, Transfers & transfers, Tier * tier);

    void allow() { possible_ = true; } // before anything is computed: kernels ask where matrices lie
    // Whether the experts of the context's event pass through slots instead of getting one each: where they do not fit,
    // or where that is asked for.
    bool takes(const Context & context) const;

    bool place(Context & context, Lock & lock) override;
    void release(Context & context) override;
    void wait(Context & context, uint8_t kinds) override;
    void finish(Context & context) override;

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

    bool next_read(Job & job) override;
    void arrived(const Job & job) override;
    bool kernels_take() const { return tier_->pool(); } // without memory nothing is multiplied with
    int most_slots(const Context & context) const;
    bool take_slots(Context & context, size_t n_absent, Lock & lock);
    void begin(const Context & context, size_t n_present);
    void stop();
    Kind & of(uint8_t kind) { return kinds_[__builtin_ctz(kind)]; }
    bool wait_for_index(Kind & kind, int i, bool first_thread);
    void pass(Kind & kind, int i, int n_threads);
    void give_free(Kind & kind);
    void end();

    Tier * const tier_;
    Kind kinds_[MOEGGUF_MAX_KINDS];
    bool possible_;
    bool given_up_ = false;             // by a thread: no slot becomes free any more
    const Context * context_ = nullptr; // nullptr: nothing is streamed
    std::atomic<const void *> ids_{nullptr};
    int il_ = -1;
    uint32_t number_ = 0;      // of this layer, so that late reads of others are recognized
    std::vector<int> slots_;   // that the experts pass through
    std::vector<int> experts_; // in order
    std::vector<int> slot_of_; // [n_expert_max] of those with a slot of their own
};

// The order in which the CPU's MUL_MAT_ID takes matrices that may still be on their way: those that are there first,
// the others as they arrive (ProMoE's reordered inference). Asked by all compute threads, about slots that are pinned.
// Nothing is multiplied with a matrix that will not come: its pass ends with the node (Acquire::must_abort).
class Arrivals {
  public:
    // Tells the tensors of the pool in the CPU's memory, where there is one and its kernels ask. Otherwise, and in
    // layers of other tiers, contexts wait before they multiply.
    Arrivals(const Layout & layout, Shared & shared, Tier * tier, StreamedSupply & streamed);

    bool on(int il) const { return !tensors_.empty() && tier_->layers.has[il]; }

  private:
    // What belongs to one pool tensor. The kernel knows the address of `next` only, so it comes first.
    struct PoolTensor {
        int (*next)(ggml_mul_mat_id_order * order, const int64_t * row_counts, int n_as, int ith);
        Arrivals * arrivals;
        int il;
        uint8_t kind;
    };

    static int next(ggml_mul_mat_id_order * order, const int64_t * row_counts, int n_as, int ith);
    int slot(const PoolTensor & t, int id, bool streams) const;
    bool is_there(const PoolTensor & t, int s) const;
    bool is_decided(const PoolTensor & t, int s) const;
    template <typename Decided>
    int wait(int n, Decided decided, bool first_thread);

    Shared & shared_;
    Tier * const tier_; // nullptr: none
    StreamedSupply & streamed_;
    std::vector<PoolTensor> tensors_; // [layout.matrices]
};

} // namespace moegguf
