// arrivals.h: the order in which the CPU's kernels multiply with a layer's matrices: first with those that are there,
// then with the others as they arrive (ProMoE's reordered inference). It waits in the kernels' threads, changes no slot
// and orders no transfer.
#pragma once

#include "tier.h"

#include "ggml-cpu.h"

namespace moegguf {

// The stream of those experts of one layer that have no slot of their own (streamed_supply.cpp). They pass through a
// few slots, from which kernels take them. Any thread may call these functions.
class ExpertStream {
  public:
    virtual ~ExpertStream() = default;
    virtual bool has(const void * ids) const = 0; // kernels that are given these ids take experts of the stream
    virtual int own_slot(int expert) const = 0;   // slot of an expert that does not pass through; -1: it does
    virtual int n_experts() const = 0;            // number of experts that pass through
    // Waits for the matrix of the stream's expert i, writes its place to `order` and returns the expert; -1: there are
    // no more, or they will not come. Every thread takes the experts in this order.
    virtual int next(ggml_mul_mat_id_order & order, int i, uint8_t kind, bool is_first_thread) = 0;
};

class Arrivals {
  public:
    // Has the kernels of the tier's pool ask for an order, where there is a pool and its kernels can. `tier`: in the
    // CPU's memory; nullptr: none. Otherwise, and in layers of other tiers, contexts wait before they multiply.
    Arrivals(const Layout & layout, Shared & shared, Tier * tier, ExpertStream & stream);

    bool possible() const { return possible_; } // kernels ask, or nothing is multiplied with, as in a simulation
    bool covers(int il) const { return !tensors_.empty() && tier_->layers.has[il]; }

    // Until done(), under the lock, which stays held. Threads of a kernel wait side by side: their time is counted
    // once. In a child process, where a thread of the parent may hold the lock, it is not taken, and nothing comes.
    template <typename Done>
    bool wait(Lock & lock, bool is_first_thread, Done done) {
        if (shared_.forked()) { return false; }
        const uint64_t start = now_ns();
        lock = Lock(shared_.mutex);
        const bool came = shared_.wait(lock, done);
        if (is_first_thread) { count_stall(shared_, *tier_, now_ns() - start); }
        return came;
    }

  private:
    // The state of one pool tensor. The kernel knows the address of `next` only, so `next` comes first.
    struct PoolTensor {
        int (*next)(ggml_mul_mat_id_order * order, const int64_t * row_counts, int n_as, int ith);
        Arrivals * arrivals;
        int il;
        uint8_t kind;
    };

    static int next(ggml_mul_mat_id_order * order, const int64_t * row_counts, int n_as, int ith);
    int next_id(const PoolTensor & t, ggml_mul_mat_id_order & order, const int64_t * row_counts, int n_as,
                bool is_first_thread);
    bool is_there(const PoolTensor & t, int s) const { return tier_->residency.ready(s) & t.kind; }
    bool is_decided(const PoolTensor & t, int s) const;
    template <typename Decided>
    int await_any(int n, Decided decided, bool is_first_thread);

    Shared & shared_;
    Tier * const tier_; // the tier in the CPU's memory; nullptr: none
    ExpertStream & stream_;
    bool possible_;
    std::vector<PoolTensor> tensors_; // [layout.matrices]; none where kernels do not ask
};

} // namespace moegguf
