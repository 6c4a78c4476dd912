// tier.h: slots on one device: their memory, their numbering, which experts they hold.
#pragma once

#include "events.h"
#include "pool.h"
#include "queues.h"
#include "residency.h"
#include "shared.h"

namespace moegguf {

// All calls come under the store's lock unless they say otherwise.
class Tier {
  public:
    Tier(TierId id, const Layout & layout, const moegguf_config & config, Shared & shared, Events & events);

    const TierId id;
    Numbering numbering;
    Residency residency;

    Pool * pool() const { return pool_.get(); } // nullptr: simulated
    Place place(int s) const { return {id, s, residency.slot(s).generation}; }
    bool holds(const Place & place) const { return residency.slot(place.slot).generation == place.generation; }

    int take_slot(int il, int expert, const Moment & now, const Bid & bid = {}); // -1: none
    int reserve_slot(int il, const Moment & now); // for experts that are streamed; -1: none
    void adopt(int s, int expert);                // which is in such a slot, whole
    void retire(int s);                 // empties a slot, and gives its memory back when it is no longer usable
    void publish(int s, uint8_t kinds); // bytes are there
    void report_residency(int s, bool resident);            // to the listener
    void resize(int n_slots);                               // no layer computes meanwhile
    bool complete() const { return n_absent_chunks_ == 0; } // any thread: every expert is there, in a slot of its own
    bool usable(int s) const { return s < residency.n_usable(); }

  private:
    int empty_slot(int il, int expert, const Moment & now, const Bid & bid);
    void release_slot(int s);

    const Layout & layout_;
    Shared & shared_;
    Events & events_;
    std::unique_ptr<Pool> pool_;
    std::atomic<int> n_absent_chunks_{0}; // of all experts
};

} // namespace moegguf
