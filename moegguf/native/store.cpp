// store.cpp: implements store.h: creates the parts of a store, starts the threads of the links, and stops all threads:
// first the listener's, then the predictor's, then the links'.
#include "store.h"

namespace moegguf {

namespace {

std::vector<std::unique_ptr<Copies>> make_copies(const Layout & layout, Shared & shared, Tiers & tiers) {
    std::vector<std::unique_ptr<Copies>> copies;
    for (Tier * to : tiers.all) {
        if (!to->ram()) { continue; }
        copies.push_back(std::make_unique<Copies>(layout, shared, tiers, *to));
        to->copies = copies.back().get();
    }
    return copies;
}

} // namespace

Store::Store(const moegguf_config & config)
    : layout(config),
      shared(config.flags),
      tiers(layout, config),
      context(*this, *tiers.compute[0], layout.n_expert_max),
      copies(make_copies(layout, shared, tiers)),
      transfers(layout, config.n_readers, shared, tiers),
      row_tables(config, shared, transfers),
      slots(layout, shared, transfers),
      streamed(make_streamed_supply(layout, shared, transfers, tiers.on_cpu)),
      staged(make_staged_supply(layout, shared, transfers, tiers)),
      forecaster(layout, shared, tiers, transfers),
      router_scores(layout),
      mapped(config.devices[0].maps ? std::make_unique<Mapped>(layout, *tiers.compute[0]) : nullptr),
      buft_(make_reserved_buft(this)) {
    try {
        shared.clock->carry(transfers, {config.sim_bytes_per_ns, config.sim_latency_ns});
        for (size_t d = 0; d < tiers.compute.size(); d++) {
            const moegguf_device & device = config.devices[d];
            Tier * const slots = tiers.compute[d].get();
            for (Tier * to : {slots, slots->staging}) {
                // Tiers of one device share staging tensors. The link of these is carried only once.
                if (!to || !to->copies || (to->staged_for && to->staged_for != slots)) { continue; }
                shared.clock->carry(*to->copies, {device.sim_copy_bytes_per_ns, device.sim_copy_latency_ns});
            }
        }
    } catch (...) {
        stop_links();
        throw;
    }
}

Store::~Store() {
    events.stop(); // first, because the listener's callbacks may still call the store
    forecaster.set(nullptr);
    stop_links();
}

// Stops the threads of all links. After this call, no link uses a supply, so supplies can be destroyed.
void Store::stop_links() {
    for (const auto & link : copies) { link->stop(); }
    transfers.stop();
    row_tables.stop();
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
    } else if (index == MOEGGUF_STAGING_TIER) {
        for (auto & tier : tiers.staging) { found.push_back(tier.get()); }
    } else if (const int d = index - MOEGGUF_DEVICE_TIER; d >= 0 && d < (int)tiers.compute.size()) {
        found.push_back(tiers.compute[d].get());
    } else {
        throw Error(
            MOEGGUF_INVALID,
            "this store has no such slots: it has no slots in RAM, no staging tensors, or no device of that number");
    }
    return found;
}

} // namespace moegguf
