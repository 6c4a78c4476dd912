// supply.h: how a layer's experts reach its multiplications in one pass: from slots of their own (Supply itself),
// streamed through a few slots (streamed_supply.h), or staged in a tensor of the layer's shape (staged_supply.h). Those
// two know nothing of each other. Acquire chooses one for each routing event.
//
// A supply may pin slots for a context, take slots for experts that are absent, and order transfers. It reads no file
// and copies nothing itself.
#pragma once

#include "context.h"
#include "transfers.h"

namespace moegguf {

// From slots: those that are there are used, and each of the others gets the slot of a victim. The supply of single
// tokens everywhere, and of prompts on the CPU that fit.
class Supply {
  public:
    Supply(const Layout & layout, Shared & shared, Transfers & transfers)
        : layout_(layout),
          shared_(shared),
          transfers_(transfers) {}
    virtual ~Supply() = default;
    Supply(const Supply &) = delete;
    Supply & operator=(const Supply &) = delete;

    // Under the store's lock, by the thread that computes.
    // Experts of the context's event that are there are pinned, slots taken for the others and transfers ordered; it
    // may raise the matrices that are to be waited for. The lock is free while it waits for slots. false: the context
    // says why.
    virtual bool place(Context & context, Lock & lock);
    // The layer has been computed, or will not be: what it holds is free.
    virtual void release(Context & context);

    // Without the lock, by the thread that computes.
    virtual void wait(Context & context, uint8_t kinds); // until these are there, or the context says why they are not
    virtual void finish(Context & context);              // kernels find the experts by the ids from here on

  protected:
    // Slots are pinned before any victim is chosen, so that no expert of the event is evicted for another of them. At
    // most so many are: the others count as absent.
    void pin_present(Context & context, int most);
    // What take() returns, once it finds a slot; -1: none becomes free.
    template <typename Take>
    int wait_for_slot(Context & context, Take take, Lock & lock);
    void fail_without_slot(Context & context, int expert);

    const Layout & layout_;
    Shared & shared_;
    Transfers & transfers_;

  private:
    bool pin_absent(Context & context, Lock & lock); // experts of the event that have no slot yet
};

// Transfers end: nothing else makes slots free, and meanwhile no prefetch takes one.
template <typename Take>
int Supply::wait_for_slot(Context & context, Take take, Lock & lock) {
    int s = -1;
    const auto over = [&] {
        s = take();
        return s >= 0 || !transfers_.reading();
    };
    if (!over()) {
        transfers_.hold_prefetches(true);
        stall(shared_, *context.pinned.tier, lock, over);
        transfers_.hold_prefetches(false);
    }
    return s;
}

} // namespace moegguf
