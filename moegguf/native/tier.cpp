// tier.cpp: implements tier.h: the operations on slots, tier sizes, and the tiers of a store.
#include "tier.h"

#include "clock.h"
#include "switches.h"

#include <algorithm>
#include <cstring>

namespace moegguf {
namespace {

constexpr int most_devices = 64;
// The result of most_slot_tokens() for a CUDA card that ggml does not know, as in a simulation. It is the smallest
// result for any real card.
constexpr int least_of_cuda = 4;

[[noreturn]] void invalid(const std::string & what) { throw Error(MOEGGUF_INVALID, what); }

std::vector<int> devices_of_layers(const Layout & layout, const moegguf_config & config) {
    if (config.n_devices < 1 || config.n_devices > most_devices || !config.devices) {
        invalid("a store needs 1 to 64 devices that compute its layers");
    }
    std::vector<int> devices(layout.layers.size(), 0);
    for (int il : layout.moe_layers) {
        devices[il] = config.device_of_layer ? config.device_of_layer[il] : 0;
        if (devices[il] < 0 || devices[il] >= config.n_devices) {
            invalid("devices are numbered from 0, but layer " + std::to_string(il) + " is on device " +
                    std::to_string(devices[il]) + " of " + std::to_string(config.n_devices));
        }
    }
    return devices;
}

} // namespace

// The CUDA backend has kernels that multiply each token on its own. It uses them up to a number of tokens that depends
// on the card and on the type of the weights. The patched backend returns this number (patches/vector-tokens.patch).
// Float types are left out, because the choice of their kernels does not depend on the number of experts. The MUSA
// backend shares these sources and also returns a number, but nobody has tried whether its products are exact.
int most_slot_tokens(const char * name) {
    ggml_backend_dev_t device = name ? ggml_backend_dev_by_name(name) : nullptr;
    if (!device) { return name && strncmp(name, "CUDA", 4) == 0 ? least_of_cuda : 1; }
    using VectorTokens = int (*)(ggml_backend_dev_t, ggml_type);
    ggml_backend_reg_t backend = ggml_backend_dev_backend_reg(device);
    const std::string of = ggml_backend_reg_name(backend);
    if (of != "CUDA" && of != "ROCm") { return 1; }
    const auto tokens_of = (VectorTokens)ggml_backend_reg_get_proc_address(backend, "moegguf_vector_tokens");
    int most = tokens_of ? INT32_MAX : 1;
    for (int type = 0; tokens_of && type < GGML_TYPE_COUNT; type++) {
        if (ggml_is_quantized((ggml_type)type)) { most = std::min(most, tokens_of(device, (ggml_type)type)); }
    }
    return is_on(Remedy::wide_windows) ? most : std::min(most, least_of_cuda);
}

namespace {

// Verifies that a device with `maps` and its store meet the conditions of mapped.h. Throws Error(INVALID) otherwise.
void check_maps(const Layout & layout, const moegguf_config & config) {
    const moegguf_device & device = config.devices[0];
    const int n = device.n_slots + layout.n_experts;
    if (config.n_devices != 1 || config.flags & MOEGGUF_SIMULATE || !device.through_ram || !maps(device.name) ||
        device.n_slots >= layout.n_experts || config.n_ram_slots < layout.n_experts ||
        most_slots(find_device(device.name), config.matrices, config.n_matrices, n, /*packed =*/false) < n) {
        invalid(
            "mapped slots need one device, a backend that puts its memory and RAM into one range of addresses, a "
            "slot in RAM for each expert, fewer slots on the device, and buffers and kernels for all of these " +
            std::to_string(n) + " slots; use placement 'slots'");
    }
}

} // namespace

Tier::Tier(TierId id, const Layout & layout, const LayerSet & layers, int n_slots, const Memory & memory, Tier * ram,
           int n_tensors)
    : id(id),
      layers(layers),
      numbering(layout, layers, n_slots, n_tensors),
      residency(layout, this->layers, numbering, counters),
      ram_(ram),
      source_(ram ? numbering.n_slots() : 0) {
    if (memory) { pool_ = std::make_unique<Pool>(layout, layers, numbering, *memory); }
    if (!numbering.resident()) { spin_briefly(); }
    borrowers_.reserve(source_.size());
}

Tiers::Tiers(const Layout & layout, const moegguf_config & config)
    : device_of_layer(devices_of_layers(layout, config)) {
    const bool has_memory = !(config.flags & MOEGGUF_SIMULATE);
    const auto has_ram = [&](int d) { return config.n_ram_slots > 0 && config.devices[d].through_ram; };
    if (config.n_ram_slots < 0) {
        invalid("the number of slots in RAM must be 0 or more, not " + std::to_string(config.n_ram_slots));
    }
    const bool is_mapped = config.devices[0].maps;
    if (is_mapped) { check_maps(layout, config); }
    const auto packs = [&](int d) {
        return has_memory && !is_mapped && packs_slots(find_device(config.devices[d].name));
    };
    bool packs_any = false;
    for (int d = 0; d < config.n_devices; d++) { packs_any = packs_any || (has_ram(d) && packs(d)); }
    const LayerSet in_ram(layout, [&](int il) { return has_ram(device_of_layer[il]); }, packs_any);
    if (!in_ram.moe_layers.empty()) {
        std::vector<ggml_backend_dev_t> devices;
        for (int d = 0; has_memory && d < config.n_devices; d++) {
            if (!has_ram(d)) { continue; }
            ggml_backend_dev_t device = find_device(config.devices[d].name);
            if (std::find(devices.begin(), devices.end(), device) == devices.end()) { devices.push_back(device); }
        }
        Memory memory;
        if (has_memory) { memory = host_memory(devices); }
        if (is_mapped) { memory->n_others = config.devices[0].n_slots; }
        ram = std::make_unique<Tier>(TierId::ram, layout, in_ram, config.n_ram_slots, memory);
    }
    for (int d = 0; d < config.n_devices; d++) {
        const moegguf_device & device = config.devices[d];
        const LayerSet layers(layout, [&](int il) { return device_of_layer[il] == d; }, packs(d));
        if (layers.moe_layers.empty() || device.n_slots <= 0) {
            invalid("each device of a store must have a layer with experts and at least one slot");
        }
        Memory memory;
        if (has_memory) { memory = device_memory(device.name, config.flags & MOEGGUF_REPACK); }
        Memory own = memory;
        if (is_mapped) {
            own->owner = ram->pool();
            own->n_others = ram->numbering.n_slots();
        }
        compute.push_back(std::make_unique<Tier>(TierId::compute, layout, layers, device.n_slots, own,
                                                 has_ram(d) ? ram.get() : nullptr));
        Tier & tier = *compute.back();
        const bool is_cpu = memory && ggml_backend_dev_type(memory->device) == GGML_BACKEND_DEVICE_TYPE_CPU;
        if (is_cpu || !device.name) { on_cpu = &tier; }
        // The number of slots that a pass may need at once if it is not staged.
        tier.pass_slots = std::min(std::max(device.n_pass_slots, layers.n_used_max), tier.residency.n_slots());
    }
    for (int d = 0; d < config.n_devices; d++) { add_staging(layout, config, d); }
    if (ram) { all.push_back(ram.get()); }
    for (const auto * tiers : {&compute, &staging}) {
        for (const auto & tier : *tiers) { all.push_back(tier.get()); }
    }
}

// Adds the staging tensors of entry d of the config. Later entries with the same device and number of tensors share the
// tensors. Does nothing if the entry has no staging tensors, or if an earlier entry has added them. Does nothing if the
// entry's slots are not filled from RAM, or if there is a slot for each expert. Throws Error(INVALID) for a number of
// tensors out of range.
void Tiers::add_staging(const Layout & layout, const moegguf_config & config, int d) {
    const moegguf_device & device = config.devices[d];
    if (device.n_staging_tensors < 0 || device.n_staging_tensors > most_staging_tensors) {
        invalid("a device has at most " + std::to_string(most_staging_tensors) + " staging tensors, not " +
                std::to_string(device.n_staging_tensors));
    }
    const std::string name = device.name ? device.name : "";
    const auto shares = [&](int other) {
        const moegguf_device & of = config.devices[other];
        const Tier & slots = *compute[other];
        return name == (of.name ? of.name : "") && of.n_staging_tensors == device.n_staging_tensors && slots.ram() &&
               !slots.numbering.resident();
    };
    Tier & first = *compute[d];
    if (device.n_staging_tensors == 0 || first.staging || !shares(d)) { return; }
    const LayerSet layers(layout, [&](int il) { return shares(device_of_layer[il]); }, first.layers.strides.packed);
    Memory memory;
    if (first.pool()) { memory = first.pool()->memory(); }
    if (memory) { // staging tensors are in no range (mapped.h)
        memory->owner = nullptr;
        memory->n_others = 0;
    }
    staging.push_back(
        std::make_unique<Tier>(TierId::staging, layout, layers, 0, memory, first.ram(), device.n_staging_tensors));
    staging.back()->staged_for = &first;
    for (int other = d; other < config.n_devices; other++) {
        if (!shares(other)) { continue; }
        Tier & slots = *compute[other];
        slots.staging = staging.back().get();
        slots.slot_tokens =
            std::clamp(slots.residency.n_slots() / slots.layers.n_used_max, 1, most_slot_tokens(device.name));
    }
}

Tier & Tiers::of(int il, int n_tokens) const {
    Tier & slots = of(il);
    return slots.staging && n_tokens > slots.slot_tokens ? *slots.staging : slots;
}

int Tier::assign(int il, int expert, const LayerStep & now, const Worth & worth) {
    const int s = residency.choose(il, expert, now, worth);
    if (s >= 0) {
        evict(s);
        residency.assign(s, il, expert);
    }
    return s;
}

void Tier::evict(int s) {
    count(counters.evictions, residency.slot(s).il >= 0);
    vacate(s);
}

void Tier::unpin(int s) {
    residency.unpin(s);
    settle(s);
}

void Tier::settle(int s) {
    const Slot & slot = residency.slot(s);
    if (slot.il < 0) { return; }
    if (!slot.streams() && residency.complete(s)) {
        give_back(s);
    } else if (slot.pins == 0 && (slot.queued == 0 || residency.failed(s))) {
        vacate(s);
    }
}

void Tier::vacate(int s) {
    const Slot & slot = residency.slot(s);
    if (slot.il < 0 || slot.reading) { return; }
    if (slot.prefetched) { count(counters.prefetch_wasted); }
    give_back(s);
    const bool leaves_device = ram_ && id == TierId::compute && !slot.streams();
    if (const int r = leaves_device ? ram_->residency.find(slot.il, slot.expert) : -1; r >= 0) {
        // The expert leaves the device. So its copy in RAM becomes the most recently used slot there, and stays longer
        // than copies of experts that are still on the device.
        ram_->residency.touch(r);
    }
    residency.vacate(s);
}

void Tier::borrow(int s, Tier & from, int source, bool is_use) {
    source_[s] = {&from, source};
    borrowers_.push_back(s);
    from.residency.pin(source, is_use);
}

void Tier::give_back(int s) {
    const int r = source(s);
    if (r < 0) { return; }
    Tier & from = source_tier(s);
    source_[s] = {};
    borrowers_.erase(std::find(borrowers_.begin(), borrowers_.end(), s));
    from.unpin(r);
}

void Tier::check_sources() const {
    for (int s : borrowers_) {
        const Slot &slot = residency.slot(s), &from = source_tier(s).residency.slot(source(s));
        if (from.pins < 1 || from.il != slot.il || from.expert != slot.expert) {
            throw Error(MOEGGUF_BROKEN,
                        "the rule 'a borrowed slot is pinned and holds the borrower's expert' is broken: slot " +
                            std::to_string(source(s)) + " has " + std::to_string(from.pins) + " pins and expert " +
                            std::to_string(from.expert) + " of layer " + std::to_string(from.il) +
                            ", its borrower expert " + std::to_string(slot.expert) + " of layer " +
                            std::to_string(slot.il));
        }
    }
}

void Tiers::check() const {
    for (const Tier * tier : all) { tier->check_sources(); }
    for (const Tier * tier : all) { tier->residency.check(); }
}

void Tier::spin_briefly() {
    if (id == TierId::compute && pool_ && pool_->host()) { short_spins_.emplace(); }
}

void Tier::resize(int n_slots) {
    if (numbering.resident() && n_slots < residency.n_slots()) {
        numbering.share_all_slots();
        if (pool_) { pool_->share_all_slots(residency.n_slots()); }
        spin_briefly();
    }
    residency.set_usable(n_slots);
    for (int s = n_slots; s < residency.n_slots(); s++) { evict(s); }
    if (pool_) { pool_->release(n_slots, residency.n_slots()); }
}

bool Tier::busy() const {
    for (int s = 0; s < residency.n_slots(); s++) {
        const Slot & slot = residency.slot(s);
        if (slot.reading || (slot.queued && !residency.failed(s))) { return true; }
    }
    return false;
}

int Tier::reallocate(int n_slots) {
    if (!pool_ || pool_->gives_pages_back()) { return n_slots; }
    const uint64_t bytes_before = pool_->bytes();
    if (pool_->reallocate(n_slots, true)) { return n_slots; }
    const std::string device = ggml_backend_dev_name(pool_->memory().device);
    if (n_slots > residency.n_usable()) {
        pool_->reallocate(residency.n_usable(), true);
        throw Error(MOEGGUF_MEMORY, device + " refused memory for " + std::to_string(n_slots) +
                                        " expert slots; the tier still has " + std::to_string(residency.n_usable()) +
                                        " slots");
    }
    // There is no memory for the old and the new pool at the same time. So all slots are emptied, and their experts are
    // read again when they are needed.
    for (int s = 0; s < residency.n_slots(); s++) { evict(s); }
    for (int n = n_slots; n > 0; n /= 2) {
        if (pool_->reallocate(n, false)) { return n; }
    }
    residency.set_usable(0);
    throw Error(MOEGGUF_MEMORY, device + " refused memory for expert slots after it had " +
                                    std::to_string(bytes_before >> 20) + " MiB of them; load the model again");
}

LookUps::~LookUps() {
    TierCounters & counters = tier_.counters;
    count(counters.lookups, n_);
    count(counters.hits_ready, ready_);
    if (const uint64_t missed = n_ - ready_; missed > 0) {
        count(counters.hits_late, late_);
        count(counters.misses, missed - late_);
    }
}

void LookUps::add(int il, int expert, bool is_ready) {
    n_ += 1;
    ready_ += is_ready;
    tier_.residency.count_look_up(il, expert);
}

void count_stall(Shared & shared, Tier & tier, uint64_t ns) {
    count(shared.counters.stall_ns, ns);
    count(tier.counters.stall_ns, ns);
    if (tier.staged_for) { count(tier.staged_for->counters.stall_ns, ns); }
}

} // namespace moegguf
