#include "arrivals.h"

#include <algorithm>

namespace moegguf {

Arrivals::Arrivals(const Layout & layout, Shared & shared, Tier & tier) : shared_(shared), tier_(tier) {
    if (shared.simulated() || !shared.has(MOEGGUF_OVERLAP) || !tier.pool()->kernels_ask_for_order()) {
        return;
    }
    tensors_.reserve(layout.matrices.size());
    for (const Matrix & m : layout.matrices) {
        tensors_.push_back({next, this, m.il, uint8_t(1 << m.kind)});
    }
    for (size_t i = 0; i < tensors_.size(); i++) {
        tier.pool()->set_op_params((int)i, &tensors_[i]);
    }
}

int Arrivals::next(ggml_mul_mat_id_order * order, const int64_t * row_counts, int n_as, int ith) {
    constexpr int most_late = sizeof(order->late) / sizeof(order->late[0]);
    const PoolTensor & t = *(const PoolTensor *)order->next;
    Arrivals & arrivals = *t.arrivals;
    while (order->i < n_as && order->n_late < most_late) {
        const int id = order->i++;
        if (row_counts[id] == 0) {
            continue;
        }
        if (arrivals.is_there(t, id)) {
            return id;
        }
        order->late[order->n_late++] = id;
    }
    while (order->n_late > 0) {
        const int i = arrivals.wait(t, order->late, order->n_late, ith == 0);
        if (i < 0) {
            break;
        }
        const int id = order->late[i];
        order->late[i] = order->late[--order->n_late];
        if (arrivals.is_there(t, id)) {
            return id;
        }
    }
    return -1;
}

bool Arrivals::is_there(const PoolTensor & t, int slot_id) const {
    return tier_.residency.ready(slot(t, slot_id)) & t.kind;
}

// There, or a read that failed, or slot ids of a failed pass: those slots may be empty, or a prefetch's that is dropped
// without notice. Under the store's lock.
bool Arrivals::is_settled(const PoolTensor & t, int slot_id) const {
    const int s = slot(t, slot_id);
    const Slot & slot = tier_.residency.slot(s);
    return is_there(t, slot_id) || tier_.residency.failed(s) || slot.pins == 0 ||
           !((slot.queued | slot.reading) & t.kind);
}

// Waits until one of the matrices has arrived, or will not come; returns its place in the list, -1 when cancelled.
int Arrivals::wait(const PoolTensor & t, const int32_t * slot_ids, int n, bool first_thread) {
    if (shared_.forked()) { // a thread of the parent may hold the lock
        return -1;
    }
    const auto first_settled = [&] {
        return int(std::find_if(slot_ids, slot_ids + n, [&](int id) { return is_settled(t, id); }) - slot_ids);
    };
    const uint64_t start = now_ns();
    Lock lock(shared_.mutex);
    int found = first_settled();
    while (found == n && !shared_.cancelled && !shared_.stopping) {
        shared_.done.wait(lock);
        found = first_settled();
    }
    if (first_thread) { // threads wait side by side: their time is counted once
        count(shared_.counters.stall_ns, now_ns() - start);
    }
    if (found < n) {
        return found;
    }
    shared_.given_up += 1;
    return -1;
}

} // namespace moegguf
