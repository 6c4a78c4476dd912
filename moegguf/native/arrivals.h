// arrivals.h: the order in which the CPU's MUL_MAT_ID takes matrices that may still be on their way: those that are
// there first, the others as they arrive (ProMoE's reordered inference).
//
// It may read the state of slots that are pinned, and waits for them. It orders no transfer and changes no slot.
#pragma once

#include "streamed_supply.h"

namespace moegguf {

// Asked by all compute threads, about slots that are pinned meanwhile. Nothing is multiplied with a matrix that will
// not come: its pass ends with the node (Acquire::must_abort).
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
