#include "store.h"

#include "reserved.h"

#include <algorithm>
#include <cstring>

namespace moegguf {

Store::Store(const moegguf_config & config)
    : layout(config),
      shared(config.flags),
      tier(TierId::tier, layout, config, shared, events),
      arrivals(layout, shared, tier),
      transfers(layout, config, shared, tier),
      forecaster(layout, shared, tier, transfers),
      acquire(*this, layout, shared, tier, transfers, forecaster, events),
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

void Store::set_policy(const moegguf_policy * policy) {
    const moegguf_policy plain = {"lru", 0, 0, nullptr};
    std::unique_ptr<EvictionPolicy> next = make_policy(layout, policy ? *policy : plain);
    Lock lock(shared.mutex);
    tier.residency.exchange_policy(next);
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

void Store::prefetch(const int32_t * il, const int32_t * experts, size_t n) {
    Lock lock(shared.mutex);
    for (size_t i = 0; i < n; i++) {
        count(shared.counters.prefetch_requested);
        if (!layout.has_expert(il[i], experts[i]) || tier.residency.find(il[i], experts[i]) >= 0 ||
            !transfers.prefetch(il[i], experts[i])) {
            count(shared.counters.prefetch_dropped);
        }
    }
    transfers.wake_readers();
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

void Store::residency(uint8_t * map, size_t n) {
    if (n != layout.n_keys()) {
        throw Error(MOEGGUF_INVALID, "the map has one byte per layer and expert");
    }
    Lock lock(shared.mutex);
    memset(map, 0, n);
    for (int s = 0; s < tier.residency.n_slots(); s++) {
        const Slot & slot = tier.residency.slot(s);
        if (slot.il >= 0) {
            map[layout.key(slot.il, slot.expert)] = tier.residency.complete(s) ? 2 : 1;
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
