// arrivals.h: the order in which the CPU kernels multiply by a layer's experts. Matrices that are already in memory
// come first, and the others follow as they arrive (ProMoE's reordered inference). Streamed experts come in a fixed
// order. This code runs and waits on the kernels' threads: in upstream's kernels (patches/arrivals.patch) and in
// kernels/multiply.cpp. It queues no transfers, and changes no slots.
//
// The streamed supply owns the only object of class Arrivals, which also orders experts that are not streamed. When all
// threads have used the last streamed expert, the streamed supply ends the stream on a kernel's thread
// (ExpertStream::next()).
#pragma once

#include "tier.h"

#include "ggml-cpu.h"

namespace moegguf {

// The experts of one layer that are streamed through a few shared slots, because they have no slots of their own
// (streamed_supply.cpp). Kernels process the experts in order, and read each from the slot through which it is
// streamed. Any thread may call these functions.
class ExpertStream {
  public:
    virtual ~ExpertStream() = default;
    virtual bool has(const void * ids) const = 0; // true: these ids belong to the layer being streamed
    // Returns the expert's own slot; negative: the expert is streamed or not chosen.
    virtual int own_slot(int expert) const = 0;
    virtual int n_experts() const = 0; // number of streamed experts
    // Waits for a matrix of the streamed expert with index i, writes its slot to `order`, and returns the expert.
    // Returns -1 if there is no such expert or its matrix will not arrive. Every thread of a kernel processes all
    // streamed experts, in the order of i. A call with i > 0 also means that the thread has finished multiplying by
    // expert i - 1.
    virtual int next(ggml_mul_mat_id_order & order, int i, uint8_t kind, bool is_first_thread) = 0;
};

class Arrivals {
  public:
    // Registers next() with the kernels of the tier's pool, if MOEGGUF_OVERLAP is set and these kernels can call
    // next(). Otherwise, each multiplication begins only when all of its matrices have arrived. `tier`: the tier in the
    // CPU's memory; nullptr: there is none.
    Arrivals(const Layout & layout, Shared & shared, Tier * tier, ExpertStream & stream);

    // Returns true if MOEGGUF_OVERLAP is set, there is a tier, and its kernels can call next(). The last condition does
    // not apply to a simulation, which runs no kernels.
    bool possible() const { return possible_; }
    bool covers(int il) const { return !tensors_.empty() && tier_->layers.has[il]; }

    // Waits until done() is true, and returns with the lock held. Returns false if the store is cancelled or closed
    // first, or if nothing is left to wait for (virtual time). All threads of a kernel wait at the same time, so only
    // the kernel's first thread counts the stall. In a child process, returns false immediately, without the lock: a
    // thread of the parent may have held the lock during the fork.
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
    // The data that next() needs for one pool tensor. The kernel knows only the address of `next`, so `next` must be
    // the first field.
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
    std::vector<PoolTensor> tensors_; // [number of matrices in the layout]; empty if no kernel calls next()
};

} // namespace moegguf
