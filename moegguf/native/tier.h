// tier.h: a tier has the slots on one device for the layers that compute there. It knows the memory of these slots,
// their numbering, their experts, and the slots of other tiers that they are filled from. A store has one tier for each
// device that computes layers, one tier in RAM that fills the tiers of devices, and staging tensors for prompts.
//
// A tier changes its own slots. It pins slots of other tiers while its own slots are filled from them. Look-ups and
// stalls are counted here and nowhere else. A tier queues nothing itself, and has no thread.
#pragma once

#include "pool.h"
#include "residency.h"
#include "shared.h"
#include "threads.h"

#include <optional>

namespace moegguf {

class Copies;

// disk: the shards of the GGUF, which have every expert. The other tiers have slots. compute: layers compute with these
// slots. ram: slots of a device are filled from these. staging: the tensors that prompts are staged in.
enum class TierId : uint8_t { disk, ram, compute, staging };

// An expert's slot, valid while the slot has this generation. On disk the slot is -1, and the layout has the offsets.
struct SlotRef {
    TierId tier = TierId::disk;
    int slot = -1;
    uint32_t generation = 0;
};

// A transfer of one matrix of an expert into a slot; of all its matrices for a prefetch that is not chunked.
struct Job {
    SlotRef source;
    SlotRef destination;
    int il = -1;
    int expert = -1;
    uint8_t kinds = 0;     // bits of the matrices to move: one bit, unless chunking is off
    bool demand = false;   // true: a routing event needs the expert; false: a prefetch
    uint32_t requests = 0; // Slot::requests of the destination when the job was queued
    uint64_t bytes = 0;    // size of these matrices; known once the transfer has begun
    uint64_t begun_ns = 0; // time at which the transfer began
    int streamed = -1;     // index of the expert among the streamed ones; -1: the slot belongs to the expert
};

// The largest number of staging tensors of a device (staged_supply.cpp).
constexpr int most_staging_tensors = 2;

// Returns the largest number of tokens in a pass for which a device's kernels round as if every expert were resident.
// The number holds for any number of slots and any type of experts. The backend knows it; without one it is 1.
int most_slot_tokens(const char * name);

using Memory = std::optional<PoolMemory>; // a simulation has none

// All calls come under the store's lock unless they say otherwise.
class Tier {
  public:
    // ram: the tier whose slots may fill slots of this tier; nullptr: slots are filled from the file only.
    // n_tensors: number of staging tensors (Numbering).
    Tier(TierId id, const Layout & layout, const LayerSet & layers, int n_slots, const Memory & memory,
         Tier * ram = nullptr, int n_tensors = 0);

    const TierId id;
    const LayerSet layers; // layers whose experts may be in this tier
    TierCounters counters; // look-ups, slots, evictions, stalls and bytes of this tier, from any source
    Numbering numbering;
    Residency residency;

    Pool * pool() const { return pool_.get(); } // nullptr: the tier has no memory
    SlotRef ref(int s) const { return {id, s, residency.slot(s).generation}; }
    bool holds(const SlotRef & ref) const { return residency.slot(ref.slot).generation == ref.generation; }
    // Returns the matrices of a transfer that its slot still needs: the slot has kept its expert, and no other transfer
    // has brought them.
    uint8_t still_wanted(const Job & job) const {
        const int s = job.destination.slot;
        const Slot & slot = residency.slot(s);
        const bool is_wanted = holds(job.destination) && !residency.failed(s);
        return is_wanted ? job.kinds & slot.queued & ~residency.ready(s) & ~slot.reading : 0;
    }

    Tier * ram() const { return ram_; } // nullptr: none
    Copies * copies = nullptr;          // copies into the slots of this tier; set before anything is computed
    Tier * staged_for = nullptr;        // a staging tier's partner with slots on the same device
    Tier * staging = nullptr;           // the staging tier of a tier with slots; nullptr: none
    int slot_tokens = 0;                // passes of more tokens are staged, if there is a staging tier
    int pass_slots = 0;                 // slots that a pass may need at once: the pool gets no smaller

    // The verbs that change a slot. A slot is free, or has an expert, or experts of a layer are streamed through it.
    // - assign gives a free slot, or else the slot of a victim, to an expert or to a layer's stream.
    // - borrow pins the slot of another tier that fills a slot, until the slot is whole or needs no bytes any more.
    // - pin keeps a slot from eviction. Every layer that computes with it and every borrower has a pin of its own.
    // - unpin drops one pin, and settles the slot with the last pin.
    // - settle gives back the slot that a whole slot has borrowed. It vacates an unpinned slot that is not whole and to
    //   which no bytes are on their way.
    // - vacate frees a slot. A slot with a transfer on its way is settled at the end of the transfer instead.
    int assign(int il, int expert, const LayerStep & now, const Worth & worth = {}); // -1: no slot; expert as in Slot
    void borrow(int s, Tier & from, int source, bool is_use); // is_use: the source becomes the most recently used one
    void pin(int s) { residency.pin(s); }
    void unpin(int s);
    void settle(int s);
    void vacate(int s);

    int source(int s) const { return source_.empty() ? -1 : source_[s].slot; } // the slot that s borrows; -1: none
    Tier & source_tier(int s) const { return *source_[s].tier; }               // only for a slot with a source
    const std::vector<int> & borrowers() const { return borrowers_; }          // slots that have a source

    // Verifies that a borrowed slot is pinned and holds the borrower's expert. Throws Error(BROKEN).
    void check_sources() const;

    // Sets the number of usable slots, while nothing is read, copied or computed. The memory of the other slots goes
    // back to the system where the system takes single pages.
    void resize(int n_slots);
    // Allocates the memory of n_slots slots anew, where the system takes no single pages. Returns the number of slots
    // that there are now. Throws Error(MEMORY) when more memory is refused; the tier then stays as it was.
    int reallocate(int n_slots);
    bool busy() const; // a matrix is on its way into a slot, or is queued

  private:
    struct Source {
        Tier * tier = nullptr;
        int slot = -1; // -1: none
    };

    // Vacates a slot for another expert, or because the tier shrinks. Counts an eviction if the slot held an expert.
    void evict(int s);
    void give_back(int s);
    void spin_shortly();

    Tier * const ram_;
    std::unique_ptr<Pool> pool_;
    std::optional<ShortSpins> short_spins_; // set if the CPU computes and may have to wait for experts
    std::vector<Source> source_;            // [n_slots]; empty if no slot is filled from RAM
    std::vector<int> borrowers_;
};

// Counts the look-ups of one routing event in a tier, and adds them to the tier's counters at the end of the event:
// lookups = hits_ready + hits_late + misses.
class LookUps {
  public:
    explicit LookUps(Tier & tier) : tier_(tier) {}
    ~LookUps();
    LookUps(const LookUps &) = delete;
    LookUps & operator=(const LookUps &) = delete;

    // Returns the expert's slot; -1: a miss.
    int find(int il, int expert) {
        const int s = tier_.residency.find(il, expert);
        n_ += 1;
        if (s >= 0) { (tier_.residency.complete(s) ? ready_ : late_) += 1; }
        tier_.residency.count_look_up(il, expert);
        return s;
    }
    void add(int il, int expert, bool is_ready);    // counts a look-up whose result the caller knows
    void add_ready(int n) { n_ += n, ready_ += n; } // counts hits of a layer whose experts are not known

  private:
    Tier & tier_;
    uint64_t n_ = 0, ready_ = 0, late_ = 0;
};

void count_stall(Shared & shared, Tier & tier, uint64_t ns);

// Calls Shared::wait for a thread that computes with slots of this tier, and counts the time as a stall.
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

    // Returns the tier that computes layer il of a pass of n_tokens tokens.
    Tier & of(int il, int n_tokens) const;
    void check() const; // calls Residency::check() and check_sources() of every tier
    void add_staging(const Layout & layout, const moegguf_device & device, Tier & slots, const Memory & memory);

    std::unique_ptr<Tier> ram;                  // slots in RAM that fill slots of devices; nullptr: none
    std::vector<std::unique_ptr<Tier>> compute; // one for each device that computes layers
    std::vector<std::unique_ptr<Tier>> staging; // staging tensors of some of these devices
    std::vector<Tier *> all;                    // every tier above
    std::vector<int> device_of_layer;           // [n_layer] index into `compute`
    Tier * on_cpu = nullptr;                    // the tier of `compute` in the CPU's memory; nullptr: none
};

} // namespace moegguf
