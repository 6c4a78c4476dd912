// tier.h: a tier is the slots on one device for the layers that compute there: their memory, their numbering, which
// experts they hold, and which slots of other tiers they are filled from. A store has one tier per device that computes
// layers, one in RAM that the tiers of devices are filled from, and staging tensors for prompts.
//
// A tier changes its own slots, and pins slots of other tiers that they are filled from. Look-ups and stalls are
// counted here and nowhere else. It knows no queue and no thread.
#pragma once

#include "pool.h"
#include "residency.h"
#include "shared.h"
#include "threads.h"

#include <optional>

namespace moegguf {

class Copies;

// Disk is where every expert lies: the shards of the GGUF. The others have slots: those that layers compute with, those
// in RAM that slots of a device are filled from, and those of tensors that prompts are staged in.
enum class TierId : uint8_t { disk, ram, compute, staging };

// An expert's slot, while the slot's generation holds. On disk the layout has its offsets, and slot is -1.
struct SlotRef {
    TierId tier = TierId::disk;
    int slot = -1;
    uint32_t generation = 0;
};

struct Job {
    SlotRef source;
    SlotRef destination;
    int il = -1;
    int expert = -1;
    uint8_t kinds = 0;     // bits of the matrices to move, one unless chunking is off
    bool demand = false;   // a routing event needs it; a prefetch otherwise
    uint32_t requests = 0; // of the destination, when this was queued
    uint64_t bytes = 0;    // of these matrices, as begun_ns from its beginning on
    uint64_t begun_ns = 0;
    int streamed = -1; // its index among the experts that are streamed; -1: the slot's own expert
};

// The most tensors of a device that prompts are staged in (staged_supply.cpp).
constexpr int most_staging_tensors = 2;

// Returns up to how many tokens of a pass a device's kernels round as with every expert resident, whatever the number
// of slots and the type of the experts: as its backend says, else 1.
int most_slot_tokens(const char * name);

using Memory = std::optional<PoolMemory>; // none, in a simulation

// All calls come under the store's lock unless they say otherwise.
class Tier {
  public:
    // ram: its slots may be filled from slots of that tier; nullptr: from the file only. n_tensors: as in Numbering.
    Tier(TierId id, const Layout & layout, const LayerSet & layers, int n_slots, const Memory & memory,
         Tier * ram = nullptr, int n_tensors = 0);

    const TierId id;
    const LayerSet layers; // whose experts may be here
    TierCounters counters; // of look-ups, slots, evictions, stalls and bytes here, wherever they came from
    Numbering numbering;
    Residency residency;

    Pool * pool() const { return pool_.get(); } // nullptr: it has no memory
    SlotRef ref(int s) const { return {id, s, residency.slot(s).generation}; }
    bool holds(const SlotRef & ref) const { return residency.slot(ref.slot).generation == ref.generation; }
    // Matrices of a transfer to a slot here that are still of use: it is the same expert's, and they came no other way.
    uint8_t still_wanted(const Job & job) const {
        const int s = job.destination.slot;
        const Slot & slot = residency.slot(s);
        const bool is_wanted = holds(job.destination) && !residency.failed(s);
        return is_wanted ? job.kinds & slot.queued & ~residency.ready(s) & ~slot.reading : 0;
    }

    Tier * ram() const { return ram_; } // nullptr: none
    Copies * copies = nullptr;          // into its slots; set before anything is computed
    Tier * staged_for = nullptr;        // of a staging tier: the one with slots on the same device
    Tier * staging = nullptr;           // the other way round
    int slot_tokens = 0;                // with staging: passes of more tokens are staged
    int pass_slots = 0;                 // that a pass may need at once: the pool gets no smaller

    // The verbs that change a slot. A slot is free, or has an expert, or experts of a layer are streamed through it.
    // assign  Gives a free slot, or else the slot of a victim, to an expert or to a layer's stream.
    // borrow  Pins a slot of another tier, from which a slot is filled, until it is whole or needs no bytes any more.
    // pin     Keeps a slot from eviction; every layer that computes with it and every borrower has a pin of its own.
    // unpin   Drops one pin, and settles the slot with the last one.
    // settle  Gives back what a whole slot has borrowed; vacates an unpinned slot that is not whole and gets no bytes.
    // vacate  Frees a slot, unless something is being read into it: then the end of that transfer settles it.
    int assign(int il, int expert, const LayerStep & now, const Worth & worth = {}); // -1: no slot; expert as in Slot
    void borrow(int s, Tier & from, int source, bool is_use); // is_use: the source becomes the most recently used one
    void pin(int s) { residency.pin(s); }
    void unpin(int s);
    void settle(int s);
    void vacate(int s);

    int source(int s) const { return source_.empty() ? -1 : source_[s].slot; } // that a slot borrows; -1: none
    Tier & source_tier(int s) const { return *source_[s].tier; }               // where there is a source
    const std::vector<int> & borrowers() const { return borrowers_; }          // slots that have a source

    // Verifies that a borrowed slot is pinned and holds the borrower's expert. Throws Error(BROKEN).
    void check_sources() const;

    // Nothing is read, copied or computed meanwhile. The memory of other slots goes back where the system takes pages.
    void resize(int n_slots);
    // Elsewhere: the memory of n_slots slots. Returns how many there are. Throws Error(MEMORY): more is refused, and it
    // stays as it was.
    int reallocate(int n_slots);
    bool busy() const; // something is on its way into a slot, or is to come

  private:
    struct Source {
        Tier * tier = nullptr;
        int slot = -1; // -1: none
    };

    void evict(int s); // vacates it for another expert, or because the tier shrinks, and counts that
    void give_back(int s);
    void spin_shortly();

    Tier * const ram_;
    std::unique_ptr<Pool> pool_;
    std::optional<ShortSpins> short_spins_; // where processors compute, and may have to wait for experts
    std::vector<Source> source_;            // [n_slots]; empty where nothing is filled from RAM
    std::vector<int> borrowers_;
};

// The look-ups of a routing event in one tier, counted there when it ends: lookups = hits_ready + hits_late + misses.
class LookUps {
  public:
    explicit LookUps(Tier & tier) : tier_(tier) {}
    ~LookUps();
    LookUps(const LookUps &) = delete;
    LookUps & operator=(const LookUps &) = delete;

    // Its slot; -1: a miss.
    int find(int il, int expert) {
        const int s = tier_.residency.find(il, expert);
        n_ += 1;
        if (s >= 0) { (tier_.residency.complete(s) ? ready_ : late_) += 1; }
        tier_.residency.count_look_up(il, expert);
        return s;
    }
    void add(int il, int expert, bool is_ready);    // one whose answer is known otherwise
    void add_ready(int n) { n_ += n, ready_ += n; } // of layers that are not told which

  private:
    Tier & tier_;
    uint64_t n_ = 0, ready_ = 0, late_ = 0;
};

void count_stall(Shared & shared, Tier & tier, uint64_t ns);

// Shared::wait by a thread that computes with slots of this tier: a stall.
template <typename Done>
bool stall(Shared & shared, Tier & tier, Lock & lock, Done done) {
    const uint64_t start = shared.clock->now_ns();
    const bool came = shared.wait(lock, done);
    count_stall(shared, tier, shared.clock->now_ns() - start);
    return came;
}

struct Tiers {
    // Throws Error(INVALID) for devices, layers and slots that do not fit together.
    Tiers(const Layout & layout, const moegguf_config & config);

    Tier & of(int il) const { return *compute[device_of_layer[il]]; }
    Tier & of(const SlotRef & ref, int il) const {
        return ref.tier == TierId::ram ? *ram : ref.tier == TierId::staging ? *of(il).staging : of(il);
    }
    template <typename Holds>
    bool any(Holds holds) const {
        return std::any_of(compute.begin(), compute.end(), [&](const auto & tier) { return holds(*tier); });
    }

    // The tier that computes a layer of a pass for so many tokens.
    Tier & of(int il, int n_tokens) const;
    void check() const; // of every tier, Residency::check() and check_sources()
    void add_staging(const Layout & layout, const moegguf_device & device, Tier & slots, const Memory & memory);

    std::unique_ptr<Tier> ram;                  // that others are filled from; nullptr: none
    std::vector<std::unique_ptr<Tier>> compute; // that layers compute on, one per device
    std::vector<std::unique_ptr<Tier>> staging; // that prompts of some of these are staged in
    std::vector<Tier *> all;                    // of these
    std::vector<int> device_of_layer;           // [n_layer]
    Tier * on_cpu = nullptr;                    // of those, the one in the CPU's memory; nullptr: none
};

} // namespace moegguf
