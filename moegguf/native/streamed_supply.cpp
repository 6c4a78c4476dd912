// streamed_supply.cpp: streams a layer's experts through a few slots of the CPU's tier, matrix by matrix. Experts that
// have slots are streamed only if the stream may need their slots. A stream is possible at a routing event of several
// tokens, if its experts outnumber the slots or if MOEGGUF_STREAM is set.
// can_stream() lists all conditions: for example, the tier must be filled directly from the file, and kernels must be
// able to wait for matrices. While the CPU multiplies by one matrix, readers read the next ones. This is the prefill
// pipeline of DuoServe-MoE (section 5.2).
//
// This supply may pin and assign slots of the CPU's tier. It chooses the streamed matrix that readers read next, and
// the one by which kernels multiply next. When a stream has ended, each of its slots keeps the expert that was streamed
// through it last.
#include "arrivals.h"
#include "supply.h"

#include <algorithm>

namespace moegguf {
namespace {

// The maximum number of slots through which a layer is streamed. Readers fill some of these slots while kernels
// multiply by others.
constexpr int most_streaming_slots = 8;

// Streams one layer at a time. All compute threads process the streamed experts in the same order. Expert experts_[i]
// uses slot slots_[i % slots_.size()]. Each of its matrices is overwritten only after every thread has multiplied by
// that matrix.
class StreamedSupply final : public Supply, private StreamedReads, private ExpertStream {
  public:
    StreamedSupply(const Layout & layout, Shared & shared, Transfers & transfers, Tier * tier)
        : Supply(layout, shared, transfers),
          tier_(tier),
          arrivals_(layout, shared, tier, *this),
          slot_of_(layout.n_expert_max, -1) {
        slots_.reserve(layout.n_expert_max);
        experts_.reserve(layout.n_expert_max);
        for (Kind & kind : kinds_) {
            kind.held = std::make_unique<std::atomic<int>[]>(layout.n_expert_max);
            kind.n_past = std::make_unique<std::atomic<int>[]>(layout.n_expert_max);
        }
        transfers.set_streamed(*this);
    }

    bool computes_on_arrival(int il) const override { return arrivals_.covers(il); }

    // Returns true if this supply can serve the event. The event must have several tokens and use a tier on the CPU
    // that has fewer slots than experts and is filled directly from the file. The event's experts must outnumber the
    // usable slots, unless MOEGGUF_STREAM is set. Kernels must be able to choose the order of matrices
    // (Arrivals::possible).
    bool can_stream(const Context & context) const override {
        const Event & event = context.event;
        const Tier & tier = *context.pinned.tier;
        if (!arrivals_.possible() || &tier != tier_ || tier.ram() || tier.numbering.resident() || event.n_tokens == 1) {
            return false;
        }
        // Kernels themselves must wait for matrices, and must read the ids in place, because has() compares the address
        // of the ids. In a simulation, no kernel runs.
        const bool asked = !kernels_take() || (event.wait_kinds == 0 && event.ids_in_place);
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

    // Waits for these matrices of the experts that have their own slots. Kernels themselves wait for streamed experts.
    // In a simulation, which has no kernels, this function first waits until the stream has ended.
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
    // The progress of the stream for one kind of matrix.
    struct Kind {
        // [slots_.size()] index in experts_ of the expert whose matrix was last read into the slot; -1: none.
        std::unique_ptr<std::atomic<int>[]> held;
        // [experts_.size()] number of threads that have multiplied by each expert's matrix.
        std::unique_ptr<std::atomic<int>[]> n_past;
        int n_asked = 0; // number of matrices whose reads have begun
        int n_free = 0;  // number of matrices by which all threads have multiplied
    };
    bool kernels_take() const { return tier_->pool(); } // false in a simulation, which has no memory and no kernels
    Kind & of(uint8_t kind) { return kinds_[__builtin_ctz(kind)]; }

    // Returns the maximum number of slots for the stream: most_streaming_slots, or about half of a small pool. The
    // remaining slots can keep experts of the layer that are already there.
    int most_slots(const Context & context) const {
        const int n_usable = tier_->residency.n_usable(), half = std::max(2, n_usable / 2);
        return std::min({most_streaming_slots, half, n_usable, (int)context.event.experts.size()});
    }

    // Assigns slots to the stream. Waits for the first slot, and takes further slots only while they are immediately
    // available. If no slot becomes available, fails the pass and returns false.
    bool take_slots(Context & context, size_t n_absent, Lock & lock) {
        const Event & event = context.event;
        const auto assign = [&] { return tier_->assign(event.il, no_expert, event.step); };
        const size_t most = std::min<size_t>(n_absent, most_slots(context));
        size_t n = 0;
        for (int s = wait_for_slot(context, assign, lock); s >= 0; s = n < most ? assign() : -1) {
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

    // Implements StreamedReads, which reader threads call. Writes to `job` the read of the next streamed matrix whose
    // slot may be overwritten. Returns false if there is none.
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
        if (!kernels_take()) { // a simulation has no kernels: the matrix is treated as used immediately
            give_free(kind);
        }
    }

    // Implements ExpertStream, which kernels call. Returns true if `ids` is the address of the streamed layer's ids.
    bool has(const void * ids) const override { return ids_.load(std::memory_order_acquire) == ids; }
    int own_slot(int expert) const override { return slot_of_[expert]; }
    int n_experts() const override { return (int)experts_.size(); }

    int next(ggml_mul_mat_id_order & order, int i, uint8_t kind_bit, bool is_first_thread) override {
        Kind & kind = of(kind_bit);
        const int n = (int)experts_.size();
        if (i > n) { return -1; }
        order.i += 1;
        if (i > 0 && kind.n_past[i - 1].fetch_add(1, std::memory_order_acq_rel) + 1 == order.n_threads) {
            Lock lock(shared_.mutex); // the last thread to multiply by the matrix lets readers overwrite it
            give_free(kind);
        }
        if (i == n || !wait_for_index(kind, i, is_first_thread)) { return -1; }
        order.at = slots_[i % slots_.size()];
        return experts_[i];
    }

    // Waits until this kind of matrix of expert experts_[i] has been read into its slot. Returns false if the read
    // failed, or if this thread or another one stopped waiting.
    bool wait_for_index(Kind & kind, int i, bool is_first_thread) {
        const size_t r = i % slots_.size();
        const std::atomic<int> & held = kind.held[r];
        if (held.load(std::memory_order_acquire) == i) { return true; }
        Lock lock;
        arrivals_.wait(lock, is_first_thread,
                       [&] { return held >= i || given_up_ || tier_->residency.failed(slots_[r]); });
        if (!lock) { return false; }
        if (held == i) { return true; }
        // Counts only the first thread of the stream that stops waiting. A failed read is not counted, because the slot
        // records that failure.
        shared_.given_up += !given_up_ && !tier_->residency.failed(slots_[r]);
        given_up_ = true;
        shared_.done.notify_all();
        return false;
    }

    void give_free(Kind & kind) {
        kind.n_free += 1; // a counter is enough, because all threads process the experts in the same order
        shared_.work.notify_one();
        bool all = true;
        for (int bit = 0; bit < MOEGGUF_MAX_KINDS; bit++) {
            const bool used = layout_.layers[il_].chunks >> bit & 1;
            all = all && (!used || kinds_[bit].n_free == (int)experts_.size());
        }
        if (all) { end(); }
    }

    // Ends the stream. The last expert that was streamed through each slot keeps that slot.
    void end() {
        const int n = (int)experts_.size(), n_slots = (int)slots_.size();
        for (int i = std::max(0, n - n_slots); i < n; i++) {
            if (tier_->residency.find(il_, experts_[i]) < 0) { // a prefetch may have given the expert another slot
                tier_->residency.end_stream(slots_[i % n_slots], experts_[i]);
            }
        }
        stop();
    }

    Tier * const tier_; // the tier of the layers that the CPU runs; nullptr: none
    Arrivals arrivals_;
    Kind kinds_[MOEGGUF_MAX_KINDS];
    bool given_up_ = false;             // true: a thread has stopped waiting, so the other threads stop, too
    const Context * context_ = nullptr; // context whose layer is streamed; nullptr: nothing is streamed
    std::atomic<const void *> ids_{nullptr};
    int il_ = -1;
    uint32_t number_ = 0;      // number of this stream; late reads of an earlier stream have a lower number
    std::vector<int> slots_;   // slots through which the experts are streamed
    std::vector<int> experts_; // streamed experts, in this order
    // [n_expert_max] slot of each expert that has its own slot; negative: the expert is streamed or not chosen.
    std::vector<int> slot_of_;
};

} // namespace

std::unique_ptr<Supply> make_streamed_supply(const Layout & layout, Shared & shared, Transfers & transfers,
                                             Tier * tier) {
    return std::make_unique<StreamedSupply>(layout, shared, transfers, tier);
}

} // namespace moegguf
