#include "store.h"

#include "reserved.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace moegguf {

namespace {

std::vector<std::unique_ptr<Copies>> make_copies(const Layout & layout, Shared & shared, Tiers & tiers) {
    std::vector<std::unique_ptr<Copies>> copies;
    for (const auto & of_kind : {&tiers.compute, &tiers.staging}) {
        for (const auto & to : *of_kind) {
            if (to && to->ram()) {
                copies.push_back(std::make_unique<Copies>(layout, shared, tiers, *to));
                to->copies = copies.back().get();
            }
        }
    }
    return copies;
}

// What is n in all for tiers with so many slots: what a pass needs of each at least, and of the rest in proportion to
// what it has above that.
std::vector<int> share_out(const std::vector<Tier *> & tiers, int n) {
    int64_t least = 0, most = 0;
    for (const Tier * tier : tiers) {
        least += tier->pass_slots;
        most += tier->residency.n_slots();
    }
    if (n < least || n > most) {
        throw Error(MOEGGUF_INVALID, "the pools can have " + std::to_string(least) + " to " + std::to_string(most) +
                                         " slots, not " + std::to_string(n));
    }
    std::vector<int> shares;
    int64_t left = n - least, room = most - least;
    for (const Tier * tier : tiers) {
        const int64_t own_room = tier->residency.n_slots() - tier->pass_slots;
        const int64_t share = room > 0 ? left * own_room / room : 0;
        shares.push_back(int(tier->pass_slots + share));
        left -= share;
        room -= own_room;
    }
    return shares;
}

// Counters that each tier has its own of.
constexpr uint64_t moegguf_counters::* tier_counters[] = {
    &moegguf_counters::lookups,    &moegguf_counters::hits_ready,   &moegguf_counters::hits_late,
    &moegguf_counters::misses,     &moegguf_counters::evictions,    &moegguf_counters::prefetch_wasted,
    &moegguf_counters::slots_used, &moegguf_counters::slots_pinned,
};

// Behind what is there already, with a comma between.
template <size_t n>
void append(char (&text)[n], const std::string & more) {
    const size_t used = strlen(text);
    if (!more.empty()) { snprintf(text + used, n - used, "%s%s", used > 0 ? ", " : "", more.c_str()); }
}

bool ends_with(const char * names, const char * name) {
    const char * last = strrchr(names, ' ');
    return strcmp(last ? last + 1 : names, name) == 0;
}

void add_pool(moegguf_tier_info & out, const Pool & pool) {
    out.pool_bytes += pool.bytes();
    out.pinned_memory = pool.memory().pinned;
    const char * device = ggml_backend_dev_name(pool.memory().device);
    if (ends_with(out.device, device)) {
        return; // its layers are in several pools
    }
    append(out.device, device);
    append(out.note, pool.memory().note);
}

// Why there are no figures of enum moegguf_tier's index, and what there is.
std::string no_tier(int index, const Tiers & tiers) {
    if (index == MOEGGUF_RAM_TIER) { return "this store has no slots in RAM below those of a device"; }
    if (index == MOEGGUF_STAGING_TIER) { return "this store stages no prompts: it has no staging tensors"; }
    std::string names;
    for (size_t i = 0; i < tiers.compute.size(); i++) {
        const Pool * pool = tiers.compute[i]->pool();
        const std::string name = pool ? ggml_backend_dev_name(pool->memory().device) : "simulated";
        names += (i > 0 ? ", " : "") + std::to_string(i) + " (" + name + ")";
    }
    return "this store has no device " + std::to_string(index - MOEGGUF_DEVICE_TIER) + "; it has " + names;
}

} // namespace

Store::Store(const moegguf_config & config)
    : layout(config),
      shared(config.flags),
      tiers(layout, config),
      context(*this, *tiers.compute[0], layout.n_expert_max),
      copies(make_copies(layout, shared, tiers)),
      transfers(layout, config.n_readers, shared, tiers),
      slots(layout, shared, transfers),
      streamed(layout, shared, transfers, tiers.on_cpu),
      staged(layout, shared, transfers, tiers),
      arrivals(layout, shared, tiers.on_cpu, streamed),
      forecaster(layout, shared, tiers, transfers),
      acquire(*this),
      buft_(make_reserved_buft(this), free_reserved_buft) {
    try {
        start_links(config);
    } catch (...) {
        stop_links();
        throw;
    }
}

Store::~Store() {
    events.stop(); // while what its callbacks may call is still there
    forecaster.set(nullptr);
    stop_links();
}

void Store::start_links(const moegguf_config & config) {
    shared.clock->carry(transfers, {config.sim_bytes_per_ns, config.sim_latency_ns});
    for (size_t d = 0; d < tiers.compute.size(); d++) {
        const moegguf_device & device = config.devices[d];
        for (Tier * to : {tiers.compute[d].get(), tiers.staging[d].get()}) {
            if (to && to->copies) {
                shared.clock->carry(*to->copies, {device.sim_copy_bytes_per_ns, device.sim_copy_latency_ns});
            }
        }
    }
}

// Supplies may be gone from then on.
void Store::stop_links() {
    for (const auto & link : copies) { link->stop(); }
    transfers.stop();
}

ggml_tensor * Store::pool_tensor(const char * name, int n_tokens) const {
    for (size_t i = 0; i < layout.matrices.size(); i++) {
        if (layout.matrices[i].name == name) {
            return tiers.of(layout.matrices[i].il, n_tokens).pool()->tensor((int)i);
        }
    }
    return nullptr;
}

std::vector<Tier *> Store::tiers_at(int index) {
    std::vector<Tier *> found;
    if (index == MOEGGUF_COMPUTE_TIER) {
        for (auto & tier : tiers.compute) { found.push_back(tier.get()); }
    } else if (index == MOEGGUF_RAM_TIER && tiers.ram) {
        found.push_back(tiers.ram.get());
    } else if (index == MOEGGUF_STAGING_TIER && staged.on()) {
        for (auto & tier : tiers.staging) {
            if (tier) { found.push_back(tier.get()); }
        }
    } else if (const int d = index - MOEGGUF_DEVICE_TIER; d >= 0 && d < (int)tiers.compute.size()) {
        found.push_back(tiers.compute[d].get());
    } else {
        throw Error(MOEGGUF_INVALID, no_tier(index, tiers));
    }
    return found;
}

void Store::set_policy(int index, const std::string & name, const Values & values) {
    const std::vector<Tier *> of = tiers_at(index);
    std::vector<std::unique_ptr<EvictionPolicy>> next;
    for (size_t i = 0; i < of.size(); i++) { next.push_back(make_policy(layout, name, values)); }
    Lock lock(shared.mutex);
    for (size_t i = 0; i < of.size(); i++) { of[i]->residency.exchange_policy(next[i]); }
    lock.unlock(); // those before are destroyed without it
}

void Store::set_scores(const float * scores, size_t n) {
    if (scores && n != layout.n_keys()) {
        throw Error(MOEGGUF_INVALID,
                    "a score table has " + std::to_string(layout.n_keys()) + " entries, not " + std::to_string(n));
    }
    std::vector<std::vector<float>> tables(tiers.compute.size(), ScoreTable::finite(scores, scores ? n : 0));
    Lock lock(shared.mutex);
    for (size_t i = 0; i < tables.size(); i++) { tiers.compute[i]->residency.exchange_scores(tables[i]); }
    lock.unlock(); // the tables before are destroyed without it
}

void Store::set_forecast(const float * probabilities, const uint8_t * known, size_t n) {
    if (probabilities && (n != layout.n_keys() || !known)) {
        throw Error(MOEGGUF_INVALID,
                    "a forecast has " + std::to_string(layout.n_keys()) + " entries, not " + std::to_string(n));
    }
    Lock lock(shared.mutex);
    for (int il = 0; il < (int)layout.layers.size(); il++) {
        if (layout.has_experts(il)) {
            tiers.of(il).residency.on_forecast(
                il, probabilities && known[il] ? probabilities + layout.key(il, 0) : nullptr);
        }
    }
}

void Store::want(Cause cause, const int32_t * il, const int32_t * experts, size_t n, bool replace) {
    Lock lock(shared.mutex);
    if (replace) { transfers.forget(cause); }
    for (size_t i = 0; i < n; i++) { transfers.want({il[i], experts[i], cause}); }
    transfers.wake_readers();
}

std::vector<Tier *> Store::resized_at(int index) {
    std::vector<Tier *> found = tiers_at(index);
    const auto in_ram = [](const Tier * tier) { return tier->pool() && tier->pool()->host(); };
    if (index == MOEGGUF_COMPUTE_TIER && !std::all_of(found.begin(), found.end(), in_ram)) {
        found.erase(std::remove_if(found.begin(), found.end(), in_ram), found.end());
    }
    return found;
}

void Store::resize(int index, int n_slots, bool at_once) {
    const std::vector<Tier *> of = resized_at(index);
    const std::vector<int> shares = of.size() > 1 ? share_out(of, n_slots) : std::vector<int>{n_slots};
    for (size_t i = 0; i < of.size(); i++) {
        at_once ? acquire.reallocate(*of[i], shares[i]) : acquire.resize(*of[i], shares[i]);
    }
}

void Store::hold_fill(bool hold) {
    Lock lock(shared.mutex);
    transfers.hold_fill(hold);
}

void Store::cancel(bool on) {
    Lock lock(shared.mutex);
    shared.cancelled = on;
    shared.done.notify_all();
}

bool Store::drain(double timeout_s) {
    constexpr double longest_s = 1e7;
    const std::chrono::duration<double> limit(timeout_s > 0 ? std::min(timeout_s, longest_s) : 0);
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(limit);
    Lock lock(shared.mutex);
    return shared.wait_regardless(lock, [this] { return transfers.idle(); }, deadline);
}

void Store::advance(uint64_t ns) {
    Lock lock(shared.mutex);
    shared.clock->advance(ns);
}

int64_t Store::replay(const moegguf_routing & routing) {
    std::vector<int32_t> slot_ids;
    const int32_t * ids = routing.expert_ids;
    int64_t n_done = 0;
    for (; n_done < routing.n_events && !context.failed(); n_done++) {
        const int n_used = routing.n_expert_used[n_done], n_tokens = routing.n_tokens[n_done];
        const size_t n = (size_t)n_used * n_tokens;
        slot_ids.assign(ids, ids + n);
        ids += n;
        acquire.acquire(context, {routing.il[n_done], slot_ids.data(), n_used, n_tokens, all_kinds});
        if (routing.compute_ns && !context.failed()) { advance(routing.compute_ns[n_done]); }
    }
    return n_done;
}

void Store::read_counters(moegguf_counters & out) const {
    copy(shared.counters, out);
    out.events_dropped = events.dropped();
    for (const auto & tier : tiers.compute) {
        for (const auto figure : tier_counters) { out.*figure += get(tier->counters.*figure); }
    }
    out.queue_needed = transfers.n_queued(true);
    out.queue_wanted = transfers.n_queued(false) + transfers.n_wanted();
    for (const auto & link : copies) {
        out.queue_needed += link->n_queued(true);
        out.queue_wanted += link->n_queued(false);
    }
}

void Store::tier_info(int index, moegguf_tier_info & out) {
    const bool no_staging = index == MOEGGUF_STAGING_TIER && !staged.on();
    const std::vector<Tier *> of = no_staging ? std::vector<Tier *>() : tiers_at(index);
    Lock lock(shared.mutex);
    out = {};
    out.resident = true;
    for (const Tier * tier : of) {
        const Counters & counters = tier->counters;
        out.lookups += get(counters.lookups);
        out.hits_ready += get(counters.hits_ready);
        out.hits_late += get(counters.hits_late);
        out.misses += get(counters.misses);
        out.evictions += get(counters.evictions);
        out.bytes_missed += get(counters.bytes_missed);
        out.bytes_prefetched += get(counters.bytes_prefetched);
        out.stall_ns += get(counters.stall_ns);
        out.stream_waits += tier->copies ? tier->copies->n_stream_waits() : 0;
        out.copy_ns += tier->copies ? tier->copies->busy_ns() : 0;
        out.slots_used += get(counters.slots_used);
        out.slots_pinned += get(counters.slots_pinned);
        out.n_slots += tier->residency.n_slots();
        out.n_slots_usable += tier->residency.n_usable();
        out.resident = out.resident && tier->numbering.resident();
        if (const Pool * pool = tier->pool()) { add_pool(out, *pool); }
    }
}

void Store::info(moegguf_pool_info & out) {
    Lock lock(shared.mutex);
    out = {};
    for (const auto & tier : tiers.compute) {
        const Pool * pool = tier->pool();
        out.n_repacked += pool ? pool->n_repacked() : 0;
        out.n_uncached += pool ? pool->n_uncached() : 0;
    }
    out.slot_bytes = layout.strides.slot_bytes();
    const Readers * readers = transfers.readers();
    out.read_buffer_bytes = readers ? readers->buffer_bytes() : 0;
    out.n_experts = layout.n_experts;
    out.n_matrices = (int)layout.matrices.size();
    out.direct = readers && readers->direct();
}

void Store::residency(int index, uint8_t * map, size_t n) {
    const std::vector<Tier *> of = tiers_at(index);
    if (n != layout.n_keys()) { throw Error(MOEGGUF_INVALID, "the map has one byte per layer and expert"); }
    Lock lock(shared.mutex);
    memset(map, 0, n);
    for (const Tier * tier : of) {
        for (int s = 0; s < tier->residency.n_slots(); s++) {
            const Slot & slot = tier->residency.slot(s);
            if (slot.expert >= 0) { map[layout.key(slot.il, slot.expert)] = tier->residency.complete(s) ? 2 : 1; }
        }
    }
}

void Store::activity(uint32_t * uses, uint32_t * loads, size_t n) {
    if (n != layout.n_keys()) { throw Error(MOEGGUF_INVALID, "activity has two numbers per layer and expert"); }
    Lock lock(shared.mutex);
    for (int il : layout.moe_layers) {
        const Residency & residency = tiers.of(il).residency;
        const int first = layout.key(il, 0);
        std::copy_n(residency.uses().begin() + first, layout.n_expert_max, uses + first);
        std::copy_n(residency.loads().begin() + first, layout.n_expert_max, loads + first);
    }
}

void Store::read_slot(int matrix, int slot, void * out, size_t n) const {
    if (matrix < 0 || matrix >= (int)layout.matrices.size()) {
        throw Error(MOEGGUF_INVALID, "no matrix " + std::to_string(matrix));
    }
    const Tier & tier = tiers.of(layout.matrices[matrix].il);
    const Pool * pool = tier.pool();
    const int n_slots = tier.residency.n_slots(), n_staged = tier.staging ? tier.staging->residency.n_slots() : 0;
    if (!pool || slot < 0 || slot >= n_slots + n_staged || n != layout.matrices[matrix].expert_bytes ||
        pool->repacked(matrix)) {
        throw Error(MOEGGUF_INVALID, "no plain slot of that size");
    }
    slot < n_slots ? pool->read(matrix, slot, out) : tier.staging->pool()->read(matrix, slot - n_slots, out);
}

} // namespace moegguf
