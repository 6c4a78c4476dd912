// arrivals.cpp: implements arrivals.h: chooses the matrix by which a CPU kernel multiplies next, and waits for matrices
// that have not arrived.
#include "arrivals.h"

namespace moegguf {

Arrivals::Arrivals(const Layout & layout, Shared & shared, Tier * tier, ExpertStream & stream)
    : shared_(shared),
      tier_(tier),
      stream_(stream),
      possible_(shared.has(MOEGGUF_OVERLAP) && tier && (!tier->pool() || tier->pool()->kernels_ask_for_order())) {
    if (!possible_ || !tier->pool()) { return; }
    tensors_.reserve(layout.matrices.size());
    for (const Matrix & m : layout.matrices) { tensors_.push_back({next, this, m.il, uint8_t(1 << m.kind)}); }
    for (size_t i = 0; i < tensors_.size(); i++) { tier->pool()->set_op_params((int)i, &tensors_[i]); }
}

// Returns the id (below n_as) of the expert that the calling kernel uses next; -1: no expert is left, or the store was
// cancelled. Writes the index of the id's slot to order->at. An id is a slot id, or an expert id in a streamed layer.
// Ids that no row uses are skipped. The layer's slots must be pinned. Matrices that will not arrive are skipped, and
// the pass then ends after this graph node (Store::must_abort).
int Arrivals::next(ggml_mul_mat_id_order * order, const int64_t * row_counts, int n_as, int ith) {
    const PoolTensor & t = *(const PoolTensor *)order->next;
    return t.arrivals->next_id(t, *order, row_counts, n_as, ith == 0);
}

int Arrivals::next_id(const PoolTensor & t, ggml_mul_mat_id_order & order, const int64_t * row_counts, int n_as,
                      bool is_first_thread) {
    constexpr int most_late = sizeof(order.late) / sizeof(order.late[0]);
    const bool streams = order.ids && stream_.has(order.ids); // true: the layer's experts are streamed
    const int first_slot = tier_->numbering.window(t.il).first_slot;
    // Returns the slot for an id; a negative number: the expert is streamed. `id`: a slot id, or an expert id in a
    // streamed layer.
    const auto slot = [&](int id) { return streams ? stream_.own_slot(id) : first_slot + id; };
    const auto take = [&](int id) {
        order.at = slot(id) - first_slot;
        return id;
    };
    while (order.i < n_as && order.n_late < most_late) {
        const int id = order.i++;
        const int s = row_counts[id] > 0 ? slot(id) : -1;
        if (s < 0) { continue; }
        if (is_there(t, s)) { return take(id); }
        order.late[order.n_late++] = id;
    }
    // Calling the stream's next() past the last streamed expert may end the stream, and own_slot() is not valid
    // afterwards. Late matrices of experts that have their own slots are therefore taken before that call.
    const int i = order.i - n_as;
    if (streams && i >= 0 && !(order.n_late > 0 && i >= stream_.n_experts())) {
        return stream_.next(order, i, t.kind, is_first_thread);
    }
    while (order.n_late > 0) {
        const auto decided = [&](int late) { return is_decided(t, slot(order.late[late])); };
        const int found = await_any(order.n_late, decided, is_first_thread);
        if (found < 0) { break; }
        const int id = order.late[found];
        order.late[found] = order.late[--order.n_late];
        if (is_there(t, slot(id))) { return take(id); }
    }
    return -1;
}

// Returns true if a wait for the matrix can end: the matrix has arrived, a transfer into its slot failed, or the matrix
// may never arrive. In the last case, the slot is not pinned, or no transfer of the matrix is queued or under way. This
// happens in a failed pass, whose slot ids are all 0. The caller must hold the store's lock.
bool Arrivals::is_decided(const PoolTensor & t, int s) const {
    const Slot & slot = tier_->residency.slot(s);
    return is_there(t, s) || tier_->residency.failed(s) || slot.pins == 0 || !((slot.queued | slot.reading) & t.kind);
}

// Waits until decided(i) is true for one of n matrices: the matrix has arrived or will not arrive. Returns the lowest
// such index i; -1: the store was cancelled or closed, or this is a child process.
template <typename Decided>
int Arrivals::await_any(int n, Decided decided, bool is_first_thread) {
    Lock lock;
    int found = 0;
    const bool any = wait(lock, is_first_thread, [&] {
        for (found = 0; found < n && !decided(found);) { found++; }
        return found < n;
    });
    if (any) { return found; }
    shared_.given_up += lock.owns_lock();
    return -1;
}

} // namespace moegguf
