// supply.h: how a layer's experts reach its multiplications in one pass. There are three, each in a file of its own,
// which know nothing of each other: from slots of their own (slot_supply.h), streamed through a few slots
// (streamed_supply.h), or staged in a tensor of the layer's shape (staged_supply.h). Acquire chooses one for each
// routing event.
//
// A supply may pin slots for a context, take slots for experts that are absent, and order transfers. It reads no file
// and copies nothing itself.
#pragma once

#include "context.h"
#include "transfers.h"

namespace moegguf {

class Supply {
  public:
    Supply(const Layout & layout, Shared & shared, Contexts & contexts, Transfers & transfers)
        : layout_(layout),
          shared_(shared),
          contexts_(contexts),
          transfers_(transfers) {}
    virtual ~Supply() = default;
    Supply(const Supply &) = delete;
    Supply & operator=(const Supply &) = delete;

    // Under the store's lock, by the thread that computes.
    // Experts of the context's event that are there are pinned, slots taken for the others and transfers ordered; it
    // may raise the matrices that are to be waited for. The lock is free while it waits for slots. false: the context
    // says why.
    virtual bool place(Context & context, Lock & lock) = 0;
    // The layer has been computed, or will not be: what it holds is free.
    virtual void release(Context & context);

    // Without the lock, by the thread that computes.
    virtual void wait(Context & context, uint8_t kinds); // until these are there, or the context says why they are not
    virtual void finish(Context & context);              // kernels find the experts by the ids from here on

  protected:
    // Slots are pinned before any victim is chosen, so that no expert of the event is evicted for another of them. At
    // most so many are: the others count as absent.
    void pin_present(Context & context, int most);
    // A context that waits for slots holds some already: another one that did the same could block both for good.
    virtual bool blocked() const { return contexts_.short_of_slots; }
    bool wait_until_unblocked(Context & context, Lock & lock);
    // What take() returns, once it finds a slot; -1: none becomes free, or it is no longer worth waiting.
    template <typename Take, typename IsWorth>
    int wait_for_slot(Context & context, Take take, IsWorth is_worth, Lock & lock);
    void fail_without_slot(Context & context, int expert);

    // How long a context waits for another one's layer to end before it calls the pool too small for both.
    static Clock::Deadline longest_wait() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

    const Layout & layout_;
    Shared & shared_;
    Contexts & contexts_;
    Transfers & transfers_;

  private:
    // While one exists, no other context and no prefetch takes a slot.
    class Shortage {
      public:
        explicit Shortage(Supply & supply) : supply_(supply) { supply_.set_short_of_slots(true); }
        ~Shortage() { supply_.set_short_of_slots(false); }
        Shortage(const Shortage &) = delete;
        Shortage & operator=(const Shortage &) = delete;

      private:
        Supply & supply_;
    };
    void set_short_of_slots(bool on);
};

// Transfers end, and another context unpins at its next routing event: nothing else makes slots free.
template <typename Take, typename IsWorth>
int Supply::wait_for_slot(Context & context, Take take, IsWorth is_worth, Lock & lock) {
    int s = -1;
    const auto over = [&] {
        s = take();
        return s >= 0 || !is_worth() || (contexts_.alone() && !transfers_.reading());
    };
    if (!over()) {
        const Shortage shortage(*this);
        stall(shared_, *context.pinned.tier, lock, over, longest_wait());
    }
    return s;
}

} // namespace moegguf
