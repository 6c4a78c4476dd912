// tier.h: slots on one device for its layers: their memory, their numbering, which experts they hold. The tiers of a
// store: one per device that computes layers, and one below them in host memory.
#pragma once

#include "events.h"
#include "pool.h"
#include "queues.h"
#include "residency.h"
#include "shared.h"
#include "short_spins.h"

#include <optional>

namespace moegguf {

class Copies;

// The most tensors of a device that prompts are staged in (staging.h).
constexpr int most_staging_tensors = 2;

// Up to so many tokens of a pass a device's kernels round as with every expert resident, however many slots there are.
int most_slot_tokens(const char * device);

// All calls come under the store's lock unless they say otherwise.
class Tier {
  public:
    // memory nullptr: simulated. below: its slots may be filled from slots of that tier; nullptr: from the file only.
    Tier(TierId id, const Layout & layout, const LayerSet & layers, const Numbering & numbering,
         const PoolMemory * memory, Tier * below, Events & events);

    const TierId id;
    const LayerSet layers; // whose experts may be here
    Counters counters;     // of look-ups, slots, evictions and stalls here
    Numbering numbering;
    Residency residency;

    Pool * pool() const { return pool_.get(); } // nullptr: simulated
    Place place(int s) const { return {id, s, residency.slot(s).generation}; }
    bool holds(const Place & place) const { return residency.slot(place.slot).generation == place.generation; }

    Tier * below() const { return below_; } // nullptr: none
    Copies * copies = nullptr;              // into its slots; set before anything is computed
    Tier * staged_for = nullptr;            // of a staging tier: the one with slots on the same device
    Tier * staging = nullptr;               // the other way round
    int slot_tokens = 0;                    // with staging: passes of more tokens are staged
    int pass_slots = 0;                     // that a pass may need at once: the pool gets no smaller
    std::atomic<int> resize_to{0};          // slots from the next routing event on; 0: no resize is due

    void set_pass_slots(int n_slots);                                            // what passes that are not staged need
    int take_slot(int il, int expert, const Moment & now, const Bid & bid = {}); // -1: none
    int reserve_slot(int il, const Moment & now); // for experts that are streamed; -1: none
    void keep(int s, int expert);                 // which is in such a slot, whole
    void retire(int s);                 // empties a slot, and gives its memory back when it is no longer usable
    void publish(int s, uint8_t kinds); // bytes are there
    void unpin(int s);                  // and what was put off while it was pinned
    void tidy(int s);                   // after a transfer to it has ended
    void count_arrival(bool demand, uint64_t bytes);
    uint64_t bytes_missed() const { return get(bytes_missed_); }
    uint64_t bytes_prefetched() const { return get(bytes_prefetched_); }

    // The slot of another tier that a slot is filled from keeps its expert until every matrix is here, or none is
    // wanted any more.
    int source(int s) const { return source_.empty() ? -1 : source_[s].slot; }
    Tier & source_tier(int s) const { return *source_[s].tier; } // where there is a source
    void borrow(int s, int source);                              // of the tier below, as a use of it
    void borrow(int s, Tier & from, int source);                 // not as a use
    void give_back(int s);
    const std::vector<int> & borrowers() const { return borrowers_; } // slots that have a source
    void report_residency(int s, bool resident);                      // to the listener
    void resize(int n_slots);                                         // no layer computes meanwhile
    // The memory of n_slots slots, where those of the others is not given back by itself. Nothing is read, copied or
    // computed meanwhile. Returns how many there are. Throws Error(MEMORY): more is refused, and it stays as it was.
    int reallocate(int n_slots);
    bool reading() const;                                   // something is on its way into a slot
    bool busy() const;                                      // or is to come into one
    bool complete() const { return n_absent_chunks_ == 0; } // any thread: every expert is there, in a slot of its own
    bool usable(int s) const { return s < residency.n_usable(); }

  private:
    struct Source {
        Tier * tier = nullptr;
        int slot = -1; // -1: none
    };

    void evict_all();
    int empty_slot(int il, int expert, const Moment & now, const Bid & bid);
    void release_slot(int s);
    void spin_shortly();

    Events & events_;
    Tier * const below_;
    std::unique_ptr<Pool> pool_;
    std::optional<ShortSpins> short_spins_; // where processors compute, and may have to wait for experts
    std::vector<Source> source_;            // [n_slots]; empty where no tier is below
    std::vector<int> borrowers_;
    uint64_t bytes_missed_ = 0; // that came into slots, from wherever
    uint64_t bytes_prefetched_ = 0;
    std::atomic<int> n_absent_chunks_{0}; // of all experts
};

// A compute thread has waited for bytes of this tier.
inline void count_stall(Shared & shared, Tier & tier, uint64_t ns) {
    count(shared.counters.stall_ns, ns);
    count(tier.counters.stall_ns, ns);
    if (tier.staged_for) {
        count(tier.staged_for->counters.stall_ns, ns);
    }
}

struct Tiers {
    // Throws Error(INVALID) for devices, layers and slots that do not fit together.
    Tiers(const Layout & layout, const moegguf_config & config, Events & events);

    Tier & of(int il) const { return *compute[device_of_layer[il]]; }
    template <typename Holds>
    bool any(Holds holds) const {
        return std::any_of(compute.begin(), compute.end(), [&](const auto & tier) { return holds(*tier); });
    }

    // The tier that computes a layer of a pass for so many tokens.
    Tier & of(int il, int n_tokens) const;
    void add_staging(const Layout & layout, const moegguf_device & device, Tier & slots, const PoolMemory * memory,
                     Events & events);
    template <typename Body>
    void for_copies(Body body) const {
        for (const auto & tiers : {&compute, &staging}) {
            for (const auto & tier : *tiers) {
                if (tier && tier->copies) {
                    body(*tier->copies);
                }
            }
        }
    }

    std::unique_ptr<Tier> below;                // in host memory, that others are filled from; nullptr: none
    std::vector<std::unique_ptr<Tier>> compute; // that layers compute on, one per device
    std::vector<std::unique_ptr<Tier>> staging; // [compute], that their prompts are staged in; nullptr: none
    std::vector<int> device_of_layer;           // [n_layer]
    Tier * on_cpu = nullptr;                    // of those, the one in the CPU's memory; nullptr: none
};

} // namespace moegguf
