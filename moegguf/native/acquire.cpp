// acquire.cpp: the functions of Store (store.h) that handle a routing event between a router's choice and the layer's
// multiplications. A supply is chosen for each event; it pins slots and queues transfers under the store's lock. Other
// functions here record announced tokens, return pass failures, and resize a tier between passes.
//
// No supply is chosen for two kinds of layers. For an idle layer (Store::idle), the functions here only count the event
// and unpin the previous layer's slots. For a layer whose slot ids the device itself looks up (mapped.h), they count
// the event after the pass.
#include "store.h"
#include "switches.h"

#include <algorithm>

namespace moegguf {
namespace {

// A routing event of several tokens with at least this many choices per expert is treated as using nearly all of the
// layer's experts. Random choices would include 98 % of them (1 - e^-4).
constexpr int64_t sweep_choices_per_expert = 4;

#ifdef MOEGGUF_CHECK
constexpr bool checks_every_event = true;
#else
constexpr bool checks_every_event = false;
#endif

constexpr auto longest_reads = std::chrono::seconds(60);

void end_layer(Context & context) {
    if (context.supply) { context.supply->release(context); }
}

// Returns the total number of usable slots in the compute tiers.
int n_usable(const Store & store) {
    int n = 0;
    for (const auto & tier : store.tiers.compute) { n += tier->residency.n_usable(); }
    return n;
}

void count_pass(Context & context, int il, int n_tokens) {
    const Store & store = context.store;
    Counters & counters = context.store.shared.counters;
    Pass & pass = context.pass;
    Announced & announced = context.announced;
    if (il <= pass.il) {
        pass.number = __atomic_add_fetch(&counters.passes, 1, __ATOMIC_RELAXED);
        pass.cycles =
            store.shared.has(MOEGGUF_SWEEP) && n_tokens > 1 && pass.n_tokens > 1 && pass.n_experts > n_usable(store);
        pass.n_experts = 0;
        pass.n_tokens = n_tokens;
        count(counters.tokens, n_tokens);
        pass.first_token = announced.next + n_tokens <= announced.n_tokens ? announced.next : -1;
        announced.next = std::min(announced.next, announced.n_tokens) + n_tokens;
        pass.decodes = n_tokens == 1 || context.has_one_token_each();
    }
    pass.il = il;
    count(counters.routing_events);
}

// Chooses the supply for the context's routing event, stores it in the context and returns it. Returns nullptr if the
// pass has already failed.
Supply * choose_supply(Context & context) {
    if (context.failed()) { return nullptr; }
    Store & store = context.store;
    Event & event = context.event;
    Pass & pass = context.pass;
    Pinned & pinned = context.pinned;
    const Layer & layer = store.layout.layers[event.il];
    event.nearly_all = event.n_tokens > 1 && (int64_t)event.n_ids() >= sweep_choices_per_expert * layer.n_expert;
    pass.n_experts += (int)event.experts.size();
    event.step = {event.il, event.nearly_all || pass.cycles, pass.n_tokens == 1,
                  pass.number * store.layout.layers.size() + event.il, pass.decodes};
    pinned.tier = &store.tiers.of(event.il, event.n_tokens);
    pinned.chunks = layer.chunks;
    const bool is_staged = pinned.tier->id == TierId::staging;
    pinned.stream = is_staged ? nullptr : event.stream;
    Supply & supply = is_staged ? *store.staged : store.streamed->can_stream(context) ? *store.streamed : store.slots;
    context.supply = &supply;
    return &supply;
}

// Queues prefetches for the next MoE layer after layer il, because the pass will probably need nearly all experts of
// that layer. Checks the next layer's experts in order, starting with expert 0, and prefetches each one that has no
// slot. Checks at most as many experts as there are usable slots, minus the experts of layer il if both layers share a
// tier. With first_only, checks only expert 0. Does nothing after the last MoE layer.
void want_next_layer(Store & store, int il, bool first_only) {
    const auto & layers = store.layout.moe_layers;
    const size_t next_row = store.layout.row_of[il] + 1;
    if (next_row == layers.size()) { return; }
    const int next = layers[next_row];
    const Tier & tier = store.tiers.of(next);
    const int n_busy = &tier == &store.tiers.of(il) ? store.layout.layers[il].n_expert : 0;
    int free_slots = first_only ? 1 : tier.residency.n_usable() - n_busy;
    for (int expert = 0; expert < store.layout.layers[next].n_expert && free_slots > 0; expert++, free_slots--) {
        if (tier.residency.find(next, expert) < 0) { store.transfers.want({next, expert}); }
    }
    store.transfers.wake_readers();
}

bool place(Context & context, Lock & lock) {
    const Event & event = context.event;
    Store & store = context.store;
    store.transfers.set_step(event.step);
    store.tiers.of(event.il).residency.on_routed(event.il);
    store.staged->observe(context, lock);
    const bool placed = context.supply->place(context, lock);
    if (placed && event.nearly_all && context.supply != store.staged.get()) {
        if (store.shared.has(MOEGGUF_SWEEP)) {
            want_next_layer(store, event.il, false);
        } else if (store.shared.has(MOEGGUF_STREAM)) {
            want_next_layer(store, event.il, true); // keeps the drive busy during attention (DuoServe-MoE, section 5.2)
        }
    }
    return placed;
}

// Verifies the bookkeeping of all tiers. Fails the pass if the bookkeeping is inconsistent.
void check(Context & context) {
    try {
        context.store.tiers.check();
    } catch (const Error & e) { context.fail(e.status, e.what()); }
}

// Reports the routing event to the listener, and to the forecaster if the event's experts were placed. The event's
// victims are already chosen, so scores that the listener sets affect only later evictions. The caller must not hold
// the store's lock: this function may wait for space in the listener's ring, and the listener may need the lock before
// it makes space.
void notify_observers(Context & context, uint64_t start_ns, bool placed) {
    const Event & event = context.event;
    Store & store = context.store;
    const Announced & announced = context.announced;
    if (!store.forecaster.on() && !store.events.on()) { return; }
    const bool batched = context.gather_tokens(event.n_tokens);
    const int32_t * sequences = batched ? event.sequences.data() : nullptr;
    const int32_t * phases = batched ? event.phases.data() : nullptr;
    if (placed && store.forecaster.on()) {
        store.forecaster.routing(
            event, {announced.sequence, announced.phase, event.n_tokens, nullptr, sequences, phases, nullptr},
            context.pass.number);
    }
    if (store.events.on()) {
        const float * inputs = store.events.wants_inputs(event.n_tokens) ? event.inputs : nullptr;
        store.events.routing({context.pass.number, start_ns, event.il, event.n_tokens, event.n_expert_used,
                              announced.sequence, announced.phase, context.pass.first_token, event.n_embd, event.ids,
                              event.weights, inputs, sequences, phases});
    }
}

// Returns false if nothing has to change: the tier is a compute tier, every expert has its own slot, and n_slots is the
// tier's full size. Throws Error(INVALID) for a staging tier, or if the tier cannot have n_slots slots.
bool changes_size(const Tier & tier, int n_slots) {
    if (tier.id == TierId::staging) {
        throw Error(MOEGGUF_INVALID,
                    "staging tensors keep the size of a layer, so their number of slots cannot change");
    }
    const bool computes = tier.id == TierId::compute;
    const int least = computes ? tier.pass_slots : 1, most = tier.residency.n_slots();
    if (n_slots < least || n_slots > most) {
        throw Error(MOEGGUF_INVALID, "the tier can have " + std::to_string(least) + " to " + std::to_string(most) +
                                         " slots, not " + std::to_string(n_slots));
    }
    return !(computes && tier.numbering.resident()) || n_slots < most;
}

} // namespace

// Functions that handle a routing event before the layer multiplies by its experts.

void Store::acquire(const Choice & choice) {
    const uint64_t start = now_ns(), waited_before = waited_ns;
    // A child process must not take the lock: a thread of the parent may have held the lock during the fork.
    if (shared.forked()) {
        context.fail_forked();
        std::fill_n(choice.ids, (size_t)choice.n_expert_used * choice.n_tokens, 0);
        return;
    }
    events.keep_step();
    forecaster.keep_step();
    if (mapped) { mapped->make_stale(); }
    Lock lock(shared.mutex);
    begin_event(choice, lock);
    Supply * supply = choose_supply(context);
    const bool placed = supply && place(context, lock);
    if (checks_every_event) { check(context); }
    lock.unlock();
    notify_observers(context, start, placed);
    if (placed) { supply->wait(context, context.event.wait_kinds); }
    if (placed && !context.failed()) { supply->finish(context); }
    if (context.failed()) { std::fill_n(choice.ids, context.event.n_ids(), 0); }
    count(shared.counters.hook_ns, now_ns() - start - (waited_ns - waited_before));
}

// Begins a routing event: checks the choice, and unpins the slots of the previous layer, or sets them aside
// (Context::set_aside). Fails the pass if the layer has no experts, or if an id is not an expert of the layer.
void Store::begin_event(const Choice & choice, Lock & lock) {
    const bool has_experts = layout.has_experts(choice.il);
    const int32_t * wrong = context.event.begin(choice, has_experts ? layout.layers[choice.il].n_expert : 0);
    if (!has_experts) {
        context.fail(MOEGGUF_ROUTING, "only layers with experts are routed, but a layer without experts was routed");
    } else if (wrong) {
        context.fail(MOEGGUF_ROUTING, "experts are numbered from 0, but the router chose expert " +
                                          std::to_string(*wrong) + " of " +
                                          std::to_string(layout.layers[choice.il].n_expert));
    }
    const bool is_same_pass = choice.il > context.pass.il;
    if (is_on(Remedy::late_notes) && is_same_pass) {
        context.set_aside(shared, lock);
    } else {
        context.await_copies(shared, lock);
    }
    end_layer(context);
    count_pass(context, choice.il, choice.n_tokens);
}

// Functions for the context's announced tokens and its failures.

bool Store::is_clear() const {
    return !context.failed() && !context.supply && context.late.slots.empty() && context.noted(shared) &&
           !shared.forked() && !(mapped && mapped->pending());
}

void Store::take_failure(moegguf_failure & out, bool clear) {
    if (shared.forked()) {
        out = context.failure.reason; // the lock is not taken: a thread of the parent may have held it during the fork
        return;
    }
    end_mapped();
    Lock lock(shared.mutex);
    context.await_copies(shared, lock);
    out = context.failed() ? context.failure.reason : moegguf_failure{};
    if (clear) {
        context.failure.reason = {};
        context.failure.failed = false;
        context.pass.il = Pass::none;
        end_layer(context);
    }
}

bool Store::must_abort() {
    if (!context.noted(shared) && !context.failed() && !shared.forked()) {
        Lock lock(shared.mutex);
        context.note_failures(shared);
    }
    return context.failed() || shared.cancelled;
}

// Discards the announced tokens. Returns false if the next tokens need no announcement: no listener is registered, and
// every expert is complete in its own slot. Always returns true in a forked child process.
bool Store::awaits_tokens(int sequence, int phase) {
    Announced & announced = context.announced;
    if (mapped) { return true; } // some expert has no slot on the device, and the log may belong to announced tokens
    announced.sequence = sequence;
    announced.phase = phase;
    announced.next = announced.n_tokens = 0;
    context.pass.il = Pass::none;
    return shared.forked() || events.on() ||
           tiers.any([](const Tier & tier) { return !tier.numbering.resident() || !tier.residency.all_ready(); });
}

void Store::announce_tokens(const moegguf_tokens_event & event) {
    if (mapped) {
        end_mapped();
        mapped->choose(shared, events.wants_weights() || events.wants_inputs(1));
    }
    Announced & announced = context.announced;
    announced.sequence = event.sequence;
    announced.phase = event.phase;
    announced.next = 0;
    announced.n_tokens = event.n_tokens;
    const int n_batched = event.sequences ? event.n_tokens : 0;
    announced.sequences.assign(event.sequences, event.sequences + n_batched);
    announced.phases.assign(event.phases, event.phases + n_batched);
    announced.outputs.assign(event.outputs, event.outputs + n_batched);
    context.pass.il = Pass::none;
    if (forecaster.on()) { forecaster.announce(event, get(shared.counters.passes) + 1); }
    if (events.on()) { events.tokens(event); }
}

// Resizes a tier. Waits until the transfers of all tiers have ended; throws Error(IO) after a minute. A smaller tier
// vacates the slots with the highest numbers, whatever the scores of their experts. If a resident tier shrinks, its
// layers share all slots permanently, even if the tier grows again.
void Store::resize(Tier & tier, int n_slots) {
    Lock lock(shared.mutex);
    if (!changes_size(tier, n_slots)) { return; }
    if (mapped && tier.id == TierId::ram) {
        throw Error(MOEGGUF_INVALID,
                    "slots in RAM that the device reads keep their number; load the model again, with "
                    "placement 'slots' or another number");
    }
    if (mapped) { mapped->make_stale(); }
    context.await_copies(shared, lock);
    end_layer(context); // unpins the slots that the last pass left pinned
    staged->drop_ahead();
    transfers.forget(Cause::request);
    transfers.pause_prefetch(true);
    const auto is_busy = [](const Tier * of) { return of->busy(); };
    const auto quiet = [&] { return std::none_of(tiers.all.begin(), tiers.all.end(), is_busy); };
    const bool ended = shared.wait_regardless(lock, quiet, std::chrono::steady_clock::now() + longest_reads);
    transfers.pause_prefetch(false);
    if (!ended) { throw Error(MOEGGUF_IO, "experts were still being read after a minute; try again"); }
    n_bindings += 1;
    tier.resize(std::min(n_slots, tier.residency.n_usable())); // vacates the slots beyond the new size
    tier.resize(tier.reallocate(n_slots));
}

// Functions for layers whose experts are all in their own slots.

bool Store::has_nothing_to_do(const Tier & tier) const {
    return tier.numbering.resident() && tier.residency.all_ready() && !events.on() && !watched_;
}

bool Store::idle(int il) const {
    return !shared.forked() && layout.has_experts(il) && has_nothing_to_do(tiers.of(il)) && !shared.cancelled;
}

bool Store::passes_over(const Tier & tier) const { return is_on(Remedy::shared_ids) && has_nothing_to_do(tier); }

uint64_t Store::passed_over() const {
    uint64_t bits = 0;
    for (size_t d = 0; d < tiers.compute.size(); d++) { bits |= (uint64_t)passes_over(*tiers.compute[d]) << d; }
    constexpr int mapped_bit = 63; // not the bit of a device: a store with mapped slots has only one device
    return bits | (uint64_t)(mapped && mapped->on()) << mapped_bit;
}

void Store::pass_over(int il, int n_expert_used, int n_tokens) {
    if (shared.forked()) {
        context.fail_forked();
    } else if (!tiers.of(il).numbering.resident()) {
        context.fail(MOEGGUF_BROKEN, "a graph uses the router's ids, but not every expert of layer " +
                                         std::to_string(il) + " is in its own slot");
    } else {
        if (shared.cancelled) { context.fail(MOEGGUF_CANCELLED, "cancelled"); }
        count_idle(il, n_expert_used, n_tokens);
    }
}

void Store::pass_mapped(const Mapped::Passed & layer, ggml_backend_t backend) {
    if (layer.n_tokens == 0) { return; } // no logits of the pass are needed
    if (shared.forked()) { return context.fail_forked(); }
    if (shared.cancelled) { context.fail(MOEGGUF_CANCELLED, "cancelled"); }
    if (mapped->overwrites(layer.il)) { end_mapped(); }
    mapped->pass(layer);
    mapped->refresh(shared, backend);
}

void Store::end_mapped() {
    if (!mapped || !mapped->pending()) { return; }
    if (context.failed()) { return mapped->drop_log(); } // layers that were not computed have no ids in the log
    Event & event = context.event;
    Lock lock(shared.mutex, std::defer_lock);
    mapped->read_log([&](const Mapped::Passed & layer, int32_t * ids) {
        events.keep_step();
        lock.lock();
        const Choice choice = {layer.il, ids, layer.n_expert_used, layer.n_tokens};
        const bool valid = !event.begin(choice, layout.layers[layer.il].n_expert);
        if (valid) {
            count_pass(context, layer.il, layer.n_tokens);
            count(shared.counters.mapped_events);
            mapped->count_uses(event, context.pass.number);
        }
        lock.unlock();
        if (valid) { notify_observers(context, now_ns(), false); }
    });
    lock.lock();
    const Pass & pass = context.pass;
    event.step = {pass.il, false, false, pass.number * layout.layers.size() + pass.il, pass.decodes};
    transfers.set_step(event.step);
    mapped->promote(transfers, event.step);
}

void Store::count_idle(int il, int n_expert_used, int n_tokens) {
    count_pass(context, il, n_tokens);
    if (context.supply) {
        Lock lock(shared.mutex);
        end_layer(context);
    }
    context.pinned.tier = &tiers.of(il);
    LookUps(tiers.of(il)).add_ready(std::min(n_expert_used * n_tokens, layout.layers[il].n_expert));
}

} // namespace moegguf
