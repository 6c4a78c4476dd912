#include "streaming.h"

#include <algorithm>

namespace moegguf {

Streaming::Streaming(const Layout & layout, Shared & shared, Tier * tier)
    : layout_(layout),
      shared_(shared),
      tier_(tier),
      possible_(shared.simulated() && shared.has(MOEGGUF_OVERLAP)),
      slot_of_(layout.n_expert_max, -1) {
    slots_.reserve(layout.n_expert_max);
    experts_.reserve(layout.n_expert_max);
    for (Kind & kind : kinds_) {
        kind.held = std::make_unique<std::atomic<int>[]>(layout.n_expert_max);
        kind.n_past = std::make_unique<std::atomic<int>[]>(layout.n_expert_max);
    }
}

void Streaming::begin(const Lane & lane, int il, size_t first) {
    lane_ = &lane;
    il_ = il;
    number_ += 1;
    given_up_ = false;
    slots_.assign(lane.pinned.begin() + first, lane.pinned.end());
    experts_.assign(lane.absent.begin(), lane.absent.end());
    std::copy(lane.slot_of.begin(), lane.slot_of.end(), slot_of_.begin());
    for (Kind & kind : kinds_) {
        kind.n_asked = kind.n_free = 0;
        for (size_t r = 0; r < slots_.size(); r++) {
            kind.held[r].store(-1, std::memory_order_relaxed);
        }
        for (size_t i = 0; i < experts_.size(); i++) {
            kind.n_past[i].store(0, std::memory_order_relaxed);
        }
    }
    ids_.store(lane.ids_memory, std::memory_order_release);
}

void Streaming::stop(const Lane & lane) {
    if (lane_ == &lane) {
        ids_.store(nullptr, std::memory_order_release);
        lane_ = nullptr;
        shared_.done.notify_all(); // others may stream now
    }
}

bool Streaming::next_read(Job & job) {
    if (!busy()) {
        return false;
    }
    for (const uint8_t kinds : order_of_use) {
        const uint8_t bit = kinds & layout_.layers[il_].chunks;
        if (bit == 0) {
            continue;
        }
        Kind & kind = of(bit);
        const int i = kind.n_asked, n_slots = (int)slots_.size();
        if (i < std::min((int)experts_.size(), kind.n_free + n_slots)) {
            kind.n_asked += 1;
            job = {Place{TierId::disk}, tier_->place(slots_[i % n_slots]), il_, experts_[i], bit, true, number_};
            job.streamed = i;
            return true;
        }
    }
    return false;
}

void Streaming::arrived(const Job & job) {
    if (!busy() || job.requests != number_) {
        return;
    }
    Kind & kind = of(job.kinds);
    kind.held[job.streamed % slots_.size()].store(job.streamed, std::memory_order_release);
    if (shared_.simulated()) { // no threads: multiplied with at once
        give_free(kind);
    }
}

int Streaming::next(ggml_mul_mat_id_order * order, int n_as, uint8_t kind_bit, int ith) {
    Kind & kind = of(kind_bit);
    const int i = order->i - n_as, n = (int)experts_.size();
    if (i > n) {
        return -1;
    }
    order->i += 1;
    if (i > 0) {
        pass(kind, i - 1, order->n_threads);
    }
    if (i == n || !wait(kind, i, ith == 0)) {
        return -1;
    }
    order->at = slots_[i % slots_.size()];
    return experts_[i];
}

// Until index i is there; false when it will not come.
bool Streaming::wait(Kind & kind, int i, bool first_thread) {
    const size_t r = i % slots_.size();
    const std::atomic<int> & held = kind.held[r];
    if (held.load(std::memory_order_acquire) == i) {
        return true;
    }
    if (shared_.forked()) {
        return false;
    }
    const uint64_t start = now_ns();
    Lock lock(shared_.mutex);
    while (held < i && !given_up_ && !tier_->residency.failed(slots_[r]) && !shared_.cancelled && !shared_.stopping) {
        shared_.done.wait(lock);
    }
    if (first_thread) {
        count_stall(shared_, *tier_, now_ns() - start);
    }
    if (held == i) {
        return true;
    }
    shared_.given_up += !given_up_ && !tier_->residency.failed(slots_[r]); // not for a failed read
    given_up_ = true;
    shared_.done.notify_all();
    return false;
}

// A thread is past index i; the last one frees its place.
void Streaming::pass(Kind & kind, int i, int n_threads) {
    if (kind.n_past[i].fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads) {
        Lock lock(shared_.mutex);
        give_free(kind);
    }
}

void Streaming::give_free(Kind & kind) {
    kind.n_free += 1; // in order: threads pass in order
    shared_.work.notify_one();
    const int n = (int)experts_.size();
    const auto done = [&](int bit) { return !(layout_.layers[il_].chunks >> bit & 1) || kinds_[bit].n_free == n; };
    bool all = true;
    for (int bit = 0; bit < MOEGGUF_MAX_KINDS; bit++) {
        all = all && done(bit);
    }
    if (all) {
        end();
    }
}

// The last experts stay, as if they had been loaded for good.
void Streaming::end() {
    const int n = (int)experts_.size(), n_slots = (int)slots_.size();
    for (int i = std::max(0, n - n_slots); i < n; i++) {
        if (tier_->residency.find(il_, experts_[i]) < 0) { // another lane may have loaded it
            tier_->keep(slots_[i % n_slots], experts_[i]);
        }
    }
    stop(*lane_);
}

} // namespace moegguf
