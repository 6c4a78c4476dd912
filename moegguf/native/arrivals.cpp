#include "arrivals.h"

namespace moegguf {

Arrivals::Arrivals(const Layout & layout, Shared & shared, Tier * tier, StreamedSupply & streamed)
    : shared_(shared),
      tier_(tier),
      streamed_(streamed) {
    if (!shared.has(MOEGGUF_OVERLAP) || !tier || !tier->pool() || !tier->pool()->kernels_ask_for_order()) { return; }
    tensors_.reserve(layout.matrices.size());
    for (const Matrix & m : layout.matrices) { tensors_.push_back({next, this, m.il, uint8_t(1 << m.kind)}); }
    streamed.allow();
    for (size_t i = 0; i < tensors_.size(); i++) { tier->pool()->set_op_params((int)i, &tensors_[i]); }
}

int Arrivals::next(ggml_mul_mat_id_order * order, const int64_t * row_counts, int n_as, int ith) {
    constexpr int most_late = sizeof(order->late) / sizeof(order->late[0]);
    const PoolTensor & t = *(const PoolTensor *)order->next;
    Arrivals & arrivals = *t.arrivals;
    const bool streams = arrivals.streamed_.serves(order->ids);
    const auto take = [&](int id) {
        order->at = arrivals.slot(t, id, streams) - arrivals.tier_->numbering.window(t.il).first_slot;
        return id;
    };
    while (order->i < n_as && order->n_late < most_late) {
        const int id = order->i++;
        const int s = row_counts[id] > 0 ? arrivals.slot(t, id, streams) : -1;
        if (s < 0) { continue; }
        if (arrivals.is_there(t, s)) { return take(id); }
        order->late[order->n_late++] = id;
    }
    // Passing the last one may end the stream, and with it slot_of: what is late comes before.
    if (streams && order->i >= n_as && !(order->n_late > 0 && arrivals.streamed_.all_taken(*order, n_as))) {
        return arrivals.streamed_.next(order, n_as, t.kind, ith); // -1: past all of them, or given up
    }
    while (order->n_late > 0) {
        const auto decided = [&](int i) { return arrivals.is_decided(t, arrivals.slot(t, order->late[i], streams)); };
        const int i = arrivals.wait(order->n_late, decided, ith == 0);
        if (i < 0) { break; }
        const int id = order->late[i];
        order->late[i] = order->late[--order->n_late];
        if (arrivals.is_there(t, arrivals.slot(t, id, streams))) { return take(id); }
    }
    return -1;
}

// The slot of an id of the kernel's: a slot id, or an expert of a layer that is streamed, -1 where it has none.
int Arrivals::slot(const PoolTensor & t, int id, bool streams) const {
    return streams ? streamed_.slot_of(id) : tier_->numbering.window(t.il).first_slot + id;
}

bool Arrivals::is_there(const PoolTensor & t, int s) const { return tier_->residency.ready(s) & t.kind; }

// There, or a read that failed, or slot ids of a failed pass: those slots may be empty, or a prefetch's that is dropped
// without notice. Under the store's lock.
bool Arrivals::is_decided(const PoolTensor & t, int s) const {
    const Slot & slot = tier_->residency.slot(s);
    return is_there(t, s) || tier_->residency.failed(s) || slot.pins == 0 || !((slot.queued | slot.reading) & t.kind);
}

// Waits until one of n matrices has arrived, or will not come; returns its index, -1 when cancelled.
template <typename Decided>
int Arrivals::wait(int n, Decided decided, bool first_thread) {
    if (shared_.forked()) { // a thread of the parent may hold the lock
        return -1;
    }
    const uint64_t start = now_ns();
    Lock lock(shared_.mutex);
    int found = 0;
    const bool any = shared_.wait(lock, [&] {
        for (found = 0; found < n && !decided(found);) { found++; }
        return found < n;
    });
    if (first_thread) { // threads wait side by side: their time is counted once
        count_stall(shared_, *tier_, now_ns() - start);
    }
    if (any) { return found; }
    shared_.given_up += 1;
    return -1;
}

} // namespace moegguf
