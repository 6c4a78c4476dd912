// streamed_supply.cpp: how the CPU's kernels take a layer's matrices.
//
// Those that may still be on their way: first the ones that are there, the others as they arrive (ProMoE's reordered
// inference). Experts of a prompt's layer that do not fit the slots pass through a few, matrix by matrix, each read
// once, while others are multiplied with: the prefill pipeline of DuoServe-MoE (section 5.2).
//
// It may pin and take slots of the CPU's tier, tells readers what to read next, and kernels which matrix to take,
// streamed or not. What is in the slots when the layer ends stays there as whole experts.
#include "supply.h"

#include "ggml-cpu.h"

#include <algorithm>

namespace moegguf {
namespace {

// Slots that a layer is streamed through, at most: while one is multiplied with, readers fill the rest.
constexpr int most_streaming_slots = 8;

// Until done(), under the lock, which stays held. Threads of a kernel wait side by side: their time is counted once. In
// a child process, where a thread of the parent may hold the lock, it is not taken, and nothing comes.
template <typename Done>
bool wait_in_kernel(Shared & shared, Tier & tier, Lock & lock, bool first_thread, Done done) {
    if (shared.forked()) { return false; }
    const uint64_t start = now_ns();
    lock = Lock(shared.mutex);
    const bool came = shared.wait(lock, done);
    if (first_thread) { count_stall(shared, tier, now_ns() - start); }
    return came;
}

// One layer at a time. All compute threads take the experts in the same order, each as index i through
// slot i % n_slots; a matrix is overwritten when every thread is past it.
class StreamedSupply final : public Supply, private StreamedReads {
  public:
    // Tells the tensors of the pool in the CPU's memory, where there is one and its kernels ask. Otherwise, and in
    // layers of other tiers, contexts wait before they multiply.
    StreamedSupply(const Layout & layout, Shared & shared, Transfers & transfers, Tier * tier)
        : Supply(layout, shared, transfers),
          tier_(tier),
          slot_of_(layout.n_expert_max, -1) {
        slots_.reserve(layout.n_expert_max);
        experts_.reserve(layout.n_expert_max);
        for (Kind & kind : kinds_) {
            kind.held = std::make_unique<std::atomic<int>[]>(layout.n_expert_max);
            kind.n_past = std::make_unique<std::atomic<int>[]>(layout.n_expert_max);
        }
        transfers.set_streamed(*this);
        possible_ = shared.has(MOEGGUF_OVERLAP) && tier && (!tier->pool() || tier->pool()->kernels_ask_for_order());
        if (!possible_ || !tier->pool()) { return; }
        tensors_.reserve(layout.matrices.size());
        for (const Matrix & m : layout.matrices) { tensors_.push_back({next, this, m.il, uint8_t(1 << m.kind)}); }
        for (size_t i = 0; i < tensors_.size(); i++) { tier->pool()->set_op_params((int)i, &tensors_[i]); }
    }

    bool orders(int il) const override { return !tensors_.empty() && tier_->layers.has[il]; }

    // Where experts do not fit, or where that is asked for. A caller that waits for matrices here cannot be given some
    // of them at a time.
    bool takes(const Context & context) const override {
        const Event & event = context.event;
        const Tier & tier = *context.pinned.tier;
        if (!possible_ || &tier != tier_ || tier.ram() || tier.numbering.resident() || event.n_tokens == 1) {
            return false;
        }
        const bool asked =
            !kernels_take() || (event.wait_kinds == 0 && event.ids_in_place); // kernels ask for these ids
        return asked && ((int)event.experts.size() > tier.residency.n_usable() || shared_.has(MOEGGUF_STREAM));
    }

    bool place(Context & context, Lock & lock) override {
        Event & event = context.event;
        Pinned & pinned = context.pinned;
        pin_present(context, tier_->residency.n_usable() - most_slots(context));
        if (shared_.has(MOEGGUF_PREEMPT)) { transfers_.drop_prefetches(event.il); }
        const size_t n_present = pinned.slots.size(), n_absent = event.experts.size() - n_present;
        if (n_absent > 0 && !take_slots(context, n_absent, lock)) { return false; }
        event.keeps_ids = n_absent > 0;
        if (event.keeps_ids) { begin(context, n_present); }
        tier_->residency.on_routing(event.il, event.ids, event.n_expert_used, event.n_tokens);
        transfers_.demand(*tier_, pinned.slots);
        transfers_.wake_readers();
        return true;
    }

    void release(Context & context) override {
        if (context_ == &context) { stop(); }
        Supply::release(context);
    }

    // Kernels wait for what they take themselves.
    void wait(Context & context, uint8_t kinds) override {
        if (!kernels_take()) {
            Lock lock(shared_.mutex);
            stall(shared_, *tier_, lock, [this] { return !context_; });
        }
        Supply::wait(context, kinds);
    }

    void finish(Context & context) override {
        if (!context.event.keeps_ids) { Supply::finish(context); }
    }

  private:
    // One kind of matrix. Index i is held by slot i % n_slots; what comes there next is i + n_slots.
    struct Kind {
        std::unique_ptr<std::atomic<int>[]> held;   // [n_slots] the index whose matrix is there, -1: none
        std::unique_ptr<std::atomic<int>[]> n_past; // [n] threads that are past it
        int n_asked = 0;
        int n_free = 0; // every thread is past the indices below
    };
    // What belongs to one pool tensor. The kernel knows the address of `next` only, so it comes first.
    struct PoolTensor {
        int (*next)(ggml_mul_mat_id_order * order, const int64_t * row_counts, int n_as, int ith);
        StreamedSupply * supply;
        int il;
        uint8_t kind;
    };

    bool kernels_take() const { return tier_->pool(); } // without memory nothing is multiplied with
    Kind & of(uint8_t kind) { return kinds_[__builtin_ctz(kind)]; }

    // Half of a small pool, so that what is there of the layer is not read again.
    int most_slots(const Context & context) const {
        const int n_usable = tier_->residency.n_usable(), half = std::max(2, n_usable / 2);
        return std::min({most_streaming_slots, half, n_usable, (int)context.event.experts.size()});
    }

    // At least one slot, and more as there are some.
    bool take_slots(Context & context, size_t n_absent, Lock & lock) {
        const Event & event = context.event;
        const auto reserve = [&] { return tier_->reserve_slot(event.il, event.step); };
        const size_t most = std::min<size_t>(n_absent, most_slots(context));
        size_t n = 0;
        for (int s = wait_for_slot(context, reserve, lock); s >= 0; s = n < most ? reserve() : -1) {
            context.pinned.pin(s);
            n += 1;
        }
        if (n == 0) { fail_without_slot(context); }
        return n > 0;
    }

    void begin(const Context & context, size_t n_present) {
        const Event & event = context.event;
        context_ = &context;
        il_ = event.il;
        number_ += 1;
        given_up_ = false;
        slots_.assign(context.pinned.slots.begin() + n_present, context.pinned.slots.end());
        slot_of_ = event.slot_of;
        experts_.clear();
        std::copy_if(event.experts.begin(), event.experts.end(), std::back_inserter(experts_),
                     [&](int expert) { return slot_of_[expert] < 0; });
        for (Kind & kind : kinds_) {
            kind.n_asked = kind.n_free = 0;
            for (size_t r = 0; r < slots_.size(); r++) { kind.held[r].store(-1, std::memory_order_relaxed); }
            for (size_t i = 0; i < experts_.size(); i++) { kind.n_past[i].store(0, std::memory_order_relaxed); }
        }
        ids_.store(event.ids, std::memory_order_release);
    }

    void stop() {
        ids_.store(nullptr, std::memory_order_release);
        context_ = nullptr;
        shared_.done.notify_all();
    }

    // StreamedReads.
    bool next_read(Job & job) override {
        if (!context_) { return false; }
        for (const uint8_t kinds : order_of_use) {
            const uint8_t bit = kinds & layout_.layers[il_].chunks;
            if (bit == 0) { continue; }
            Kind & kind = of(bit);
            const int i = kind.n_asked, n_slots = (int)slots_.size();
            if (i < std::min((int)experts_.size(), kind.n_free + n_slots)) {
                kind.n_asked += 1;
                job = {SlotRef{}, tier_->ref(slots_[i % n_slots]), il_, experts_[i], bit, true, number_};
                job.streamed = i;
                return true;
            }
        }
        return false;
    }

    void arrived(const Job & job) override {
        if (!context_ || job.requests != number_) { return; }
        Kind & kind = of(job.kinds);
        kind.held[job.streamed % slots_.size()].store(job.streamed, std::memory_order_release);
        if (!kernels_take()) { // multiplied with at once
            give_free(kind);
        }
    }

    // Compute threads, about slots that are pinned meanwhile. Nothing is multiplied with a matrix that will not come:
    // its pass ends with the node (Acquire::must_abort).
    static int next(ggml_mul_mat_id_order * order, const int64_t * row_counts, int n_as, int ith) {
        const PoolTensor & t = *(const PoolTensor *)order->next;
        return t.supply->next_id(t, order, row_counts, n_as, ith);
    }

    int next_id(const PoolTensor & t, ggml_mul_mat_id_order * order, const int64_t * row_counts, int n_as, int ith) {
        constexpr int most_late = sizeof(order->late) / sizeof(order->late[0]);
        const bool streams = order->ids && ids_.load(std::memory_order_acquire) == order->ids; // this layer's experts
        const int first_slot = tier_->numbering.window(t.il).first_slot;
        // Of a slot id, or of an expert of a layer that is streamed; -1: it has none.
        const auto slot = [&](int id) { return streams ? slot_of_[id] : first_slot + id; };
        const auto take = [&](int id) {
            order->at = slot(id) - first_slot;
            return id;
        };
        while (order->i < n_as && order->n_late < most_late) {
            const int id = order->i++;
            const int s = row_counts[id] > 0 ? slot(id) : -1;
            if (s < 0) { continue; }
            if (is_there(t, s)) { return take(id); }
            order->late[order->n_late++] = id;
        }
        // Passing the last one may end the stream, and with it slot_of_: what is late comes before.
        if (streams && order->i >= n_as && !(order->n_late > 0 && order->i - n_as >= (int)experts_.size())) {
            return next_streamed(order, n_as, t.kind, ith); // -1: past all of them, or given up
        }
        while (order->n_late > 0) {
            const int i =
                await_any(order->n_late, [&](int late) { return is_decided(t, slot(order->late[late])); }, ith == 0);
            if (i < 0) { break; }
            const int id = order->late[i];
            order->late[i] = order->late[--order->n_late];
            if (is_there(t, slot(id))) { return take(id); }
        }
        return -1;
    }

    bool is_there(const PoolTensor & t, int s) const { return tier_->residency.ready(s) & t.kind; }

    // There, or a read that failed, or slot ids of a failed pass: those slots may be empty, or a prefetch's that is
    // dropped without notice. Under the store's lock.
    bool is_decided(const PoolTensor & t, int s) const {
        const Slot & slot = tier_->residency.slot(s);
        return is_there(t, s) || tier_->residency.failed(s) || slot.pins == 0 ||
               !((slot.queued | slot.reading) & t.kind);
    }

    // Waits until one of n matrices has arrived, or will not come; returns its index, -1 when cancelled.
    template <typename Decided>
    int await_any(int n, Decided decided, bool first_thread) {
        Lock lock;
        int found = 0;
        const bool any = wait_in_kernel(shared_, *tier_, lock, first_thread, [&] {
            for (found = 0; found < n && !decided(found);) { found++; }
            return found < n;
        });
        if (any) { return found; }
        shared_.given_up += lock.owns_lock();
        return -1;
    }

    // -1: no more, or they will not come.
    int next_streamed(ggml_mul_mat_id_order * order, int n_as, uint8_t kind_bit, int ith) {
        Kind & kind = of(kind_bit);
        const int i = order->i - n_as, n = (int)experts_.size();
        if (i > n) { return -1; }
        order->i += 1;
        if (i > 0 && kind.n_past[i - 1].fetch_add(1, std::memory_order_acq_rel) + 1 == order->n_threads) {
            Lock lock(shared_.mutex); // the last thread that is past it frees its slot
            give_free(kind);
        }
        if (i == n || !wait_for_index(kind, i, ith == 0)) { return -1; }
        order->at = slots_[i % slots_.size()];
        return experts_[i];
    }

    // Until index i is there; false when it will not come.
    bool wait_for_index(Kind & kind, int i, bool first_thread) {
        const size_t r = i % slots_.size();
        const std::atomic<int> & held = kind.held[r];
        if (held.load(std::memory_order_acquire) == i) { return true; }
        Lock lock;
        wait_in_kernel(shared_, *tier_, lock, first_thread,
                       [&] { return held >= i || given_up_ || tier_->residency.failed(slots_[r]); });
        if (!lock) { return false; }
        if (held == i) { return true; }
        shared_.given_up += !given_up_ && !tier_->residency.failed(slots_[r]); // not for a failed read
        given_up_ = true;
        shared_.done.notify_all();
        return false;
    }

    void give_free(Kind & kind) {
        kind.n_free += 1; // in order: threads pass in order
        shared_.work.notify_one();
        bool all = true;
        for (int bit = 0; bit < MOEGGUF_MAX_KINDS; bit++) {
            const bool used = layout_.layers[il_].chunks >> bit & 1;
            all = all && (!used || kinds_[bit].n_free == (int)experts_.size());
        }
        if (all) { end(); }
    }

    // The last experts stay, as if they had been loaded for good.
    void end() {
        const int n = (int)experts_.size(), n_slots = (int)slots_.size();
        for (int i = std::max(0, n - n_slots); i < n; i++) {
            if (tier_->residency.find(il_, experts_[i]) < 0) { // a prefetch may have loaded it
                tier_->keep(slots_[i % n_slots], experts_[i]);
            }
        }
        stop();
    }

    Tier * const tier_;               // in the CPU's memory; nullptr: none
    std::vector<PoolTensor> tensors_; // [layout.matrices]
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

} // namespace

std::unique_ptr<Supply> make_streamed_supply(const Layout & layout, Shared & shared, Transfers & transfers,
                                             Tier * tier) {
    return std::make_unique<StreamedSupply>(layout, shared, transfers, tier);
}

} // namespace moegguf
