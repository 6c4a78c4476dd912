// tier.h: a tier is a set of slots in one kind of memory, for some layers. It owns the slots' memory (Pool), their
// numbering, and the bookkeeping of their experts (Residency). It knows the slots of other tiers from which its own
// slots are filled.
//
// A store has a tier for each entry of moegguf_config::devices: a device, or some of a device's layers. The store may
// also have a tier in RAM that fills the tiers of devices. The staging tensors of a device form another tier, for
// prompts. An entry has no staging tensors if it has a slot for every expert, or if its slots are not filled from RAM.
// All other entries of the device share the tensors.
//
// A slot has space for any expert of the tier's layers. Several entries for one device therefore save memory if some
// layers have larger experts than others.
//
// Supplies pin (class Pinned), assign and unpin the slots of layers. The staged supply also borrows the slots from
// which it copies. Class Mapped assigns slots between passes, and borrows the slots in RAM from which it fills them.
// The transfer queue (class Transfers) assigns slots to prefetches, and assigns and borrows the slots in RAM from which
// device slots are filled. Both kinds of links settle a slot when a transfer into it has ended. A slot that failed is
// vacated once it has no pins.
//
// A tier changes its own slots. It pins slots of other tiers while its own slots are filled from them. Look-ups are
// counted only here: ready hits, late hits (the expert has a slot but is not complete) and misses. A tier queues no
// transfers, and has no thread that moves experts.
#pragma once

#include "pool.h"
#include "residency.h"
#include "shared.h"
#include "threads.h"

#include <optional>

namespace moegguf {

class Copies;

// disk: the shards of the GGUF, which contain every expert. All other tiers have slots. ram: slots from which device
// slots are filled. compute: slots of devices that run layers. staging: tensors with all experts of a layer, for
// prompts.
enum class TierId : uint8_t { disk, ram, compute, staging };

// A reference to the slot of an expert. It is valid while the slot has this generation. For the tier `disk`, `slot` is
// -1, and the layout contains the offsets in the file.
struct SlotRef {
    TierId tier = TierId::disk;
    int slot = -1;
    uint32_t generation = 0;
};

// A transfer into a slot. It moves one matrix of an expert, or, without MOEGGUF_CHUNKED, several matrices of an expert
// that is prefetched from the file.
struct Job {
    SlotRef source;
    SlotRef destination;
    int il = -1;
    int expert = -1;
    uint8_t kinds = 0;   // bits of the matrices to move
    bool demand = false; // true: a compute thread waits for the transfer; false: a prefetch
    // Value of Slot::requests of the destination when the job was queued. Streamed: the number of the stream.
    uint32_t requests = 0;
    uint64_t bytes = 0;    // total size of these matrices in bytes; set when the transfer begins
    uint64_t begun_ns = 0; // time at which the transfer began
    int streamed = -1;     // index of the expert in the stream; -1: the expert is not streamed
};

// The maximum number of staging tensors of one device (staged_supply.cpp).
constexpr int most_staging_tensors = 2;

// Returns the largest number of tokens in a pass for which a device's results are bit-identical to those with every
// expert resident. The number is valid for any number of slots and any weight type. For a CUDA card that ggml does not
// know, it is least_of_cuda. It is 1 for NULL, for any other unknown device, for devices of other backends than CUDA
// and ROCm, and if the ggml backend does not report it. `name`: ggml's name of the device.
int most_slot_tokens(const char * name);

using Memory = std::optional<PoolMemory>; // empty in a simulation

// A set of slots in one kind of memory. Callers hold the store's lock unless a comment says otherwise.
class Tier {
  public:
    // ram: the tier from which slots of this tier may be filled; nullptr: they are filled only from the file.
    // n_tensors: number of staging tensors; 0: this is not a staging tier.
    Tier(TierId id, const Layout & layout, const LayerSet & layers, int n_slots, const Memory & memory,
         Tier * ram = nullptr, int n_tensors = 0);

    const TierId id;
    const LayerSet layers; // layers whose experts may be in this tier
    // This tier's look-ups, used slots, evictions, stalls and other counts, and the number of bytes transferred into
    // its slots.
    TierCounters counters;
    Numbering numbering;
    Residency residency;

    Pool * pool() const { return pool_.get(); } // nullptr in a simulation, which has no memory
    SlotRef ref(int s) const { return {id, s, residency.slot(s).generation}; }
    bool holds(const SlotRef & ref) const { return residency.slot(ref.slot).generation == ref.generation; }
    // Returns the bits of a transfer's matrices that are still needed. They are needed while they are queued, the slot
    // has neither changed owners nor failed, and no other transfer has brought them or is bringing them.
    uint8_t still_wanted(const Job & job) const {
        const int s = job.destination.slot;
        const Slot & slot = residency.slot(s);
        const bool is_wanted = holds(job.destination) && !residency.failed(s);
        return is_wanted ? job.kinds & slot.queued & ~residency.ready(s) & ~slot.reading : 0;
    }

    // Tier in RAM from which this tier is filled; nullptr: it is filled from the file.
    Tier * ram() const { return ram_; }
    Copies * copies = nullptr; // link that copies into this tier's slots; nullptr: none
    // If this is a staging tier: the tier on the same device with the slots of the layer that is being staged; else
    // nullptr. Before the first layer, one of these tiers.
    Tier * staged_for = nullptr;
    Tier * staging = nullptr; // if this is a tier with slots: the staging tier of the same device; nullptr: none
    int slot_tokens = 0;      // events with more tokens use the staging tier, if there is one
    bool still = false;       // true: requests and forecasts get no slots in the tier (mapped.h)
    int pass_slots = 0;       // number of slots that a pass may need at once; Store::resize() refuses fewer

    // The operations on slots. A slot is free, holds an expert, or has a layer's experts streamed through it.
    // - assign reserves a free slot, or else the slot of a victim, for an expert or for a layer's stream. In a resident
    //   or staging tier, an expert can get only its own slot.
    // - borrow makes a slot of another tier the source of a slot. The source is pinned until the slot is complete or
    //   vacated.
    // - pin protects a slot from eviction. Each layer that uses the slot holds a pin, and so does each slot that is
    //   filled from it.
    // - unpin drops one pin, and settles the slot.
    // - settle unpins the source of a complete slot. It vacates an unpinned, incomplete slot if no transfer into the
    //   slot is under way, and if none is queued or the slot failed.
    // - vacate frees a slot. It does nothing while a transfer into the slot is under way; the slot is settled when the
    //   transfer ends.
    int assign(int il, int expert, const LayerStep & now, const Worth & worth = {}); // returns the slot; -1: none
    // is_use: the call counts as a use of the source, which becomes its tier's most recently used slot.
    void borrow(int s, Tier & from, int source, bool is_use);
    void pin(int s) { residency.pin(s); }
    void unpin(int s);
    void settle(int s);
    void vacate(int s);

    int source(int s) const { return source_.empty() ? -1 : source_[s].slot; } // slot from which s is filled; -1: none
    Tier & source_tier(int s) const { return *source_[s].tier; }               // only for a slot with a source
    const std::vector<int> & borrowers() const { return borrowers_; }          // slots with a source

    // Verifies that the source of each slot is pinned and holds the same expert as the slot. Throws Error(BROKEN)
    // otherwise.
    void check_sources() const;

    // Sets the number of usable slots, and evicts the experts from slot n_slots and all later slots. No read, copy or
    // pass may be under way. If the memory of these slots can be returned page by page, it goes back to the system.
    void resize(int n_slots);
    // Allocates new memory for n_slots slots. Does nothing if memory can be returned page by page, or in a simulation.
    // Returns the number of slots for which there is memory. If a smaller size is refused, this may be fewer than
    // n_slots. Throws Error(MEMORY) if a larger size is refused (the tier is then unchanged), or if no memory at all is
    // left.
    int reallocate(int n_slots);
    bool busy() const; // true: a transfer is under way, or is queued for a slot that has not failed

  private:
    struct Source {
        Tier * tier = nullptr;
        int slot = -1; // slot in `tier`; -1: there is no source
    };

    // Vacates a slot. Counts an eviction if the slot was not free.
    void evict(int s);
    void give_back(int s);
    void spin_briefly();

    Tier * const ram_;
    std::unique_ptr<Pool> pool_;
    std::optional<ShortSpins> short_spins_; // set if the CPU uses these slots and may have to wait for experts
    std::vector<Source> source_;            // [n_slots] source of each slot; empty if no slot is filled from RAM
    std::vector<int> borrowers_;
};

// Counts the look-ups of one routing event in a tier. The destructor adds them to the tier's counters: lookups =
// hits_ready + hits_late + misses.
class LookUps {
  public:
    explicit LookUps(Tier & tier) : tier_(tier) {}
    ~LookUps();
    LookUps(const LookUps &) = delete;
    LookUps & operator=(const LookUps &) = delete;

    // Looks up an expert, and returns its slot; -1: a miss.
    int find(int il, int expert) {
        const int s = tier_.residency.find(il, expert);
        n_ += 1;
        if (s >= 0) { (tier_.residency.complete(s) ? ready_ : late_) += 1; }
        tier_.residency.count_look_up(il, expert);
        return s;
    }
    void add(int il, int expert, bool is_ready);    // counts a look-up: a hit if is_ready, else a miss
    void add_ready(int n) { n_ += n, ready_ += n; } // counts n hits in a layer whose chosen experts are not known

  private:
    Tier & tier_;
    uint64_t n_ = 0, ready_ = 0, late_ = 0;
};

void count_stall(Shared & shared, Tier & tier, uint64_t ns);

// Waits for done() like Shared::wait. The calling thread runs a layer with slots of this tier, so the time counts as a
// stall.
template <typename Done>
bool stall(Shared & shared, Tier & tier, Lock & lock, Done done) {
    const uint64_t start = shared.clock->now_ns();
    const bool came = shared.wait(lock, done);
    count_stall(shared, tier, shared.clock->now_ns() - start);
    return came;
}

struct Tiers {
    // Throws Error(INVALID) for inconsistent devices, layers and slots, and Error(MEMORY) if a device refuses memory.
    Tiers(const Layout & layout, const moegguf_config & config);

    Tier & of(int il) const { return *compute[device_of_layer[il]]; }
    Tier & of(const SlotRef & ref, int il) const {
        return ref.tier == TierId::ram ? *ram : ref.tier == TierId::staging ? *of(il).staging : of(il);
    }
    template <typename Holds>
    bool any(Holds holds) const {
        return std::any_of(compute.begin(), compute.end(), [&](const auto & tier) { return holds(*tier); });
    }

    // Returns the tier that layer il uses for n_tokens tokens: the device's slots, or its staging tensors.
    Tier & of(int il, int n_tokens) const;
    void check() const; // calls Residency::check() and check_sources() of every tier
    void add_staging(const Layout & layout, const moegguf_config & config, int d);

    std::unique_ptr<Tier> ram;                  // slots in RAM from which device slots are filled; nullptr: none
    std::vector<std::unique_ptr<Tier>> compute; // one for each device that runs layers
    std::vector<std::unique_ptr<Tier>> staging; // one for each device with staging tensors
    std::vector<Tier *> all;                    // every tier above
    std::vector<int> device_of_layer;           // [n_layer] index of the layer's device in `compute`
    Tier * on_cpu = nullptr;                    // the tier in `compute` that belongs to the CPU; nullptr: none
};

} // namespace moegguf
