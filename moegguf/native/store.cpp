#include "store.h"

#include "reserved.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace moegguf {

namespace {

std::unique_ptr<Tier> make_lower(const Layout & layout, const moegguf_config & config, Counters & counters,
                                 Events & events) {
    if (config.n_lower_slots == 0) {
        return nullptr;
    }
    if (config.n_lower_slots < 0) {
        throw Error(MOEGGUF_INVALID, "a tier has slots, not " + std::to_string(config.n_lower_slots));
    }
    const auto make = [&](const PoolMemory * memory) {
        return std::make_unique<Tier>(TierId::lower, layout, config.n_lower_slots, memory, nullptr, counters, events);
    };
    if (config.flags & MOEGGUF_SIMULATE) {
        return make(nullptr);
    }
    const PoolMemory memory = host_memory(find_device(config.device));
    return make(&memory);
}

Tier make_tier(const Layout & layout, const moegguf_config & config, Tier * below, Counters & counters,
               Events & events) {
    if (config.flags & MOEGGUF_SIMULATE) {
        return Tier(TierId::compute, layout, config.n_slots, nullptr, below, counters, events);
    }
    const PoolMemory memory = device_memory(config.device, config.flags & MOEGGUF_REPACK);
    return Tier(TierId::compute, layout, config.n_slots, &memory, below, counters, events);
}

std::unique_ptr<Copies> make_copies(const Layout & layout, const moegguf_config & config, Shared & shared, Tier * from,
                                    Tier & to) {
    return from ? std::make_unique<Copies>(layout, config, shared, *from, to) : nullptr;
}

} // namespace

Store::Store(const moegguf_config & config)
    : layout(config),
      shared(config.flags),
      below(make_lower(layout, config, lower_counters, events)),
      tier(make_tier(layout, config, below.get(), shared.counters, events)),
      streaming(layout, shared, tier),
      arrivals(layout, shared, tier, streaming),
      copies(make_copies(layout, config, shared, below.get(), tier)),
      transfers(layout, config, shared, tier, below.get(), copies.get(), streaming),
      forecaster(layout, shared, tier, transfers),
      acquire(*this, layout, shared, tier, below.get(), copies.get(), streaming, transfers, forecaster, events),
      buft_(make_reserved_buft(this), free_reserved_buft) {
}

ggml_tensor * Store::pool_tensor(const char * name) const {
    for (size_t i = 0; i < layout.matrices.size(); i++) {
        if (layout.matrices[i].name == name) {
            return tier.pool()->tensor((int)i);
        }
    }
    return nullptr;
}

Tier & Store::tier_at(int index) {
    if (index == MOEGGUF_COMPUTE_TIER) {
        return tier;
    }
    if (index != MOEGGUF_LOWER_TIER || !below) {
        throw Error(MOEGGUF_INVALID, "this store has no tier " + std::to_string(index));
    }
    return *below;
}

void Store::set_policy(int index, const moegguf_policy * policy) {
    Tier & of = tier_at(index);
    const moegguf_policy plain = {"lru", 0, 0, nullptr};
    std::unique_ptr<EvictionPolicy> next = make_policy(layout, policy ? *policy : plain);
    Lock lock(shared.mutex);
    of.residency.exchange_policy(next);
    lock.unlock(); // the one before is destroyed without it
}

void Store::set_scores(const float * scores, size_t n) {
    if (scores && n != layout.n_keys()) {
        throw Error(MOEGGUF_INVALID,
                    "a score table has " + std::to_string(layout.n_keys()) + " entries, not " + std::to_string(n));
    }
    std::vector<float> table = ScoreTable::finite(scores, scores ? n : 0);
    Lock lock(shared.mutex);
    tier.residency.exchange_scores(table);
    lock.unlock(); // the table before is destroyed without it
}

void Store::set_forecast(const float * probabilities, const uint8_t * known, size_t n) {
    if (probabilities && (n != layout.n_keys() || !known)) {
        throw Error(MOEGGUF_INVALID,
                    "a forecast has " + std::to_string(layout.n_keys()) + " entries, not " + std::to_string(n));
    }
    Lock lock(shared.mutex);
    for (int il = 0; il < (int)layout.layers.size(); il++) {
        if (layout.has_experts(il)) {
            tier.residency.on_forecast(il, probabilities && known[il] ? probabilities + layout.key(il, 0) : nullptr);
        }
    }
}

void Store::prefetch(const int32_t * il, const int32_t * experts, size_t n, bool replace) {
    Lock lock(shared.mutex);
    if (replace) {
        transfers.drop_requests();
    }
    for (size_t i = 0; i < n; i++) {
        count(shared.counters.prefetch_requested);
        if (!layout.has_expert(il[i], experts[i]) || tier.residency.find(il[i], experts[i]) >= 0 ||
            !transfers.prefetch(il[i], experts[i])) {
            count(shared.counters.prefetch_dropped);
        }
    }
    transfers.wake_readers();
}

void Store::warm(const int32_t * il, const int32_t * experts, size_t n) {
    std::vector<PrefetchRequest> wanted;
    wanted.reserve(n);
    for (size_t i = 0; i < n; i++) {
        wanted.push_back({il[i], experts[i]});
    }
    Lock lock(shared.mutex);
    transfers.set_warm(wanted);
}

void Store::resize(int index, int n_slots) {
    &tier_at(index) == &tier ? acquire.resize(n_slots) : acquire.resize_below(n_slots);
}

void Store::reallocate(int index, int n_slots) {
    acquire.reallocate(tier_at(index), n_slots);
}

void Store::cancel(bool on) {
    Lock lock(shared.mutex);
    shared.cancelled = on;
    shared.done.notify_all();
}

bool Store::drain(double timeout_s) {
    Lock lock(shared.mutex);
    if (shared.simulated()) {
        while (!transfers.idle()) {
            transfers.step();
        }
        return true;
    }
    constexpr double longest_s = 1e7;
    const double limit_s = timeout_s > 0 ? std::min(timeout_s, longest_s) : 0;
    return shared.done.wait_for(lock, std::chrono::duration<double>(limit_s), [this] { return transfers.idle(); });
}

void Store::advance(uint64_t ns) {
    Lock lock(shared.mutex);
    transfers.advance(ns);
}

int64_t Store::replay(Lane & lane, const moegguf_routing & routing) {
    std::vector<int32_t> slot_ids;
    const int32_t * ids = routing.expert_ids;
    int64_t n_done = 0;
    for (; n_done < routing.n_events && !lane.failed; n_done++) {
        const int n_used = routing.n_expert_used[n_done], n_tokens = routing.n_tokens[n_done];
        const size_t n = (size_t)n_used * n_tokens;
        slot_ids.assign(ids, ids + n);
        ids += n;
        acquire.acquire(lane, routing.il[n_done], slot_ids.data(), n_used, n_tokens, all_kinds);
        if (routing.compute_ns && !lane.failed) {
            advance(routing.compute_ns[n_done]);
        }
    }
    return n_done;
}

void Store::read_counters(moegguf_counters & out) const {
    copy(shared.counters, out);
    out.events_dropped = events.dropped();
    if (copies) {
        out.queue_needed += copies->n_queued(true);
        out.queue_wanted += copies->n_queued(false);
    }
}

void Store::tier_info(int index, moegguf_tier_info & out) {
    Tier & of = tier_at(index);
    const Counters & counters = of.counters();
    Lock lock(shared.mutex);
    out = {};
    out.lookups = get(counters.lookups);
    out.hits_ready = get(counters.hits_ready);
    out.hits_late = get(counters.hits_late);
    out.misses = get(counters.misses);
    out.evictions = get(counters.evictions);
    out.bytes_missed = of.bytes_missed();
    out.bytes_prefetched = of.bytes_prefetched();
    out.stall_ns = get(counters.stall_ns);
    out.stream_waits = copies && &of == &tier ? copies->n_stream_waits() : 0;
    out.slots_used = get(counters.slots_used);
    out.slots_pinned = get(counters.slots_pinned);
    out.n_slots = of.residency.n_slots();
    out.n_slots_usable = of.residency.n_usable();
    out.resident = of.numbering.resident();
    if (const Pool * pool = of.pool()) {
        out.pool_bytes = pool->bytes();
        out.pinned_memory = pool->memory().pinned;
        snprintf(out.device, sizeof(out.device), "%s", ggml_backend_dev_name(pool->memory().device));
        snprintf(out.note, sizeof(out.note), "%s", pool->memory().note.c_str());
    }
}

void Store::info(moegguf_pool_info & out) {
    Lock lock(shared.mutex);
    const Pool * pool = tier.pool();
    out.slot_bytes = layout.strides.slot_bytes();
    out.pool_bytes = pool ? pool->bytes() : 0;
    out.staging_bytes = transfers.staging_bytes();
    out.n_slots = tier.residency.n_slots();
    out.n_slots_usable = tier.residency.n_usable();
    out.n_experts = layout.n_experts;
    out.n_layers = layout.n_moe_layers;
    out.n_repacked = pool ? pool->n_repacked() : 0;
    out.n_matrices = (int)layout.matrices.size();
    out.resident = tier.numbering.resident();
    out.direct = transfers.direct();
}

void Store::residency(int index, uint8_t * map, size_t n) {
    const Tier & of = tier_at(index);
    if (n != layout.n_keys()) {
        throw Error(MOEGGUF_INVALID, "the map has one byte per layer and expert");
    }
    Lock lock(shared.mutex);
    memset(map, 0, n);
    for (int s = 0; s < of.residency.n_slots(); s++) {
        const Slot & slot = of.residency.slot(s);
        if (slot.expert >= 0) {
            map[layout.key(slot.il, slot.expert)] = of.residency.complete(s) ? 2 : 1;
        }
    }
}

void Store::activity(uint32_t * uses, uint32_t * loads, size_t n) {
    if (n != layout.n_keys()) {
        throw Error(MOEGGUF_INVALID, "activity has two numbers per layer and expert");
    }
    Lock lock(shared.mutex);
    std::copy_n(tier.residency.uses().begin(), n, uses);
    std::copy_n(tier.residency.loads().begin(), n, loads);
}

void Store::read_slot(int matrix, int slot, void * out, size_t n) const {
    const Pool * pool = tier.pool();
    if (!pool || matrix < 0 || matrix >= (int)layout.matrices.size() || slot < 0 || slot >= tier.residency.n_slots() ||
        n != layout.matrices[matrix].expert_bytes || pool->repacked(matrix)) {
        throw Error(MOEGGUF_INVALID, "no plain slot of that size");
    }
    pool->read(matrix, slot, out);
}

} // namespace moegguf
