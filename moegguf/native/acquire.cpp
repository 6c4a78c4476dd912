// acquire.cpp: the barrier between the router's choice and the multiplication (store.h). Under the store's lock it has
// the context's supply pin slots and order transfers, and tiers change their sizes. It changes no slot and no graph.
#include "store.h"

#include <algorithm>

namespace moegguf {
namespace {

// From this many choices per expert on, a pass touches practically every expert (1 - e^-4 = 98 % of them).
constexpr int64_t sweep_choices_per_expert = 4;

constexpr auto longest_reads = std::chrono::seconds(60);

// What a stream waited for has been copied, or has failed, as that layer is computed: only the thread that copies may
// not have said so yet. Neither what the next layer evicts nor whether the pass has failed depends on that.
void await_copies(Context & context, Lock & lock) {
    const Pinned & pinned = context.pinned;
    const auto noted = [&](int s) { return !(pinned.tier->residency.slot(s).reading & pinned.ordered); };
    context.store.shared.wait(lock, [&] { return std::all_of(pinned.slots.begin(), pinned.slots.end(), noted); });
    context.pinned.ordered = 0;
}

void end_layer(Context & context) {
    if (context.supply) { context.supply->release(context); }
}

// Slots of all devices.
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

// How the experts of the context's event reach its multiplications; nullptr: the pass has failed.
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
    Supply & supply = is_staged ? *store.staged : store.streamed->takes(context) ? *store.streamed : store.slots;
    context.supply = &supply;
    return &supply;
}

// All of it that fits beside this one, from where its experts are nearest: the next pass over it needs nearly all. Or
// its first expert, where that finds a slot.
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
            want_next_layer(store, event.il, true); // for its attention's time (DuoServe-MoE, section 5.2)
        }
    }
    return placed;
}

// Victims are chosen before the listener gets an event, so that its scores act from the next one on. This may wait for
// space in the ring, which the listener may need the lock to make: it is not held here.
void tell_observers(Context & context, uint64_t start_ns, bool placed) {
    const Event & event = context.event;
    Store & store = context.store;
    const Announced & announced = context.announced;
    if (!store.forecaster.on() && !store.events.on()) { return; }
    const bool batched = context.gather_tokens(event.n_tokens);
    const int32_t * sequences = batched ? event.sequences.data() : nullptr;
    const int32_t * phases = batched ? event.phases.data() : nullptr;
    if (placed && store.forecaster.on()) {
        const float * inputs = store.forecaster.wants_inputs(event.n_tokens) ? event.inputs : nullptr;
        store.forecaster.routing(event.il, {event.n_tokens, announced.sequence, sequences}, event.ids,
                                 event.n_expert_used, inputs, event.n_embd, context.pass.number);
    }
    if (store.events.on()) {
        const float * inputs = store.events.wants_inputs(event.n_tokens) ? event.inputs : nullptr;
        store.events.routing({context.pass.number, start_ns, event.il, event.n_tokens, event.n_expert_used,
                              announced.sequence, announced.phase, context.pass.first_token, event.n_embd, event.ids,
                              event.weights, inputs, sequences, phases});
    }
}

// Whether a tier is to have another size than it has. Throws Error(INVALID) for one that it cannot have.
bool changes_size(const Tier & tier, int n_slots) {
    if (tier.id == TierId::staging) { throw Error(MOEGGUF_INVALID, "staging tensors keep the size of a layer"); }
    const bool computes = tier.id == TierId::compute;
    const int least = computes ? tier.pass_slots : 1, most = tier.residency.n_slots();
    if (n_slots < least || n_slots > most) {
        throw Error(MOEGGUF_INVALID, "the tier can have " + std::to_string(least) + " to " + std::to_string(most) +
                                         " slots, not " + std::to_string(n_slots));
    }
    return !(computes && tier.numbering.resident()) || n_slots < most;
}

} // namespace

// The barrier.

void Acquire::acquire(Context & context, const Choice & choice) {
    const uint64_t start = now_ns(), waited_before = waited_ns;
    if (store_.shared.forked()) { // a thread of the parent may hold the lock
        context.fail(MOEGGUF_FORKED, "the model was loaded in the parent process; load it again in this one");
        std::fill_n(choice.ids, (size_t)choice.n_expert_used * choice.n_tokens, 0);
        return;
    }
    store_.events.keep_step();
    store_.forecaster.keep_step();
    Lock lock(store_.shared.mutex);
    begin_event(context, choice, lock);
    Supply * supply = choose_supply(context);
    const bool placed = supply && place(context, lock);
    lock.unlock();
    tell_observers(context, start, placed);
    if (placed) { supply->wait(context, context.event.wait_kinds); }
    if (placed && !context.failed()) { supply->finish(context); }
    if (context.failed()) { std::fill_n(choice.ids, context.event.n_ids(), 0); }
    count(store_.shared.counters.hook_ns, now_ns() - start - (waited_ns - waited_before));
}

// What the layer before held is free.
void Acquire::begin_event(Context & context, const Choice & choice, Lock & lock) {
    const bool has_experts = store_.layout.has_experts(choice.il);
    const int32_t * wrong = context.event.begin(choice, has_experts ? store_.layout.layers[choice.il].n_expert : 0);
    if (!has_experts) {
        context.fail(MOEGGUF_ROUTING, "a layer without experts was routed");
    } else if (wrong) {
        context.fail(MOEGGUF_ROUTING, "the router chose expert " + std::to_string(*wrong) + " of " +
                                          std::to_string(store_.layout.layers[choice.il].n_expert));
    }
    await_copies(context, lock);
    context.note_failures(store_.shared);
    end_layer(context);
    count_pass(context, choice.il, choice.n_tokens);
}

// The context, its tokens and its failures.

bool Acquire::is_clear(const Context & context) const {
    return !context.failed() && !context.supply && context.noted(store_.shared) && !store_.shared.forked();
}

void Acquire::take_failure(Context & context, moegguf_failure & out, bool clear) {
    if (store_.shared.forked()) {
        out = context.failure.reason; // the lock may be held by a thread of the parent
        return;
    }
    Lock lock(store_.shared.mutex);
    await_copies(context, lock);
    context.note_failures(store_.shared);
    out = context.failed() ? context.failure.reason : moegguf_failure{};
    if (clear) {
        context.failure.reason = {};
        context.failure.failed = false;
        context.pass.il = Pass::none;
        end_layer(context);
    }
}

bool Acquire::must_abort(Context & context) {
    const Shared & shared = store_.shared;
    if (!context.noted(shared) && !context.failed() && !shared.forked()) {
        Lock lock(store_.shared.mutex);
        context.note_failures(shared);
    }
    return context.failed() || shared.cancelled;
}

// Nothing is predicted for a pool that has every expert.
bool Acquire::awaits_tokens(Context & context, int sequence, int phase) {
    Announced & announced = context.announced;
    announced.sequence = sequence;
    announced.phase = phase;
    announced.next = announced.n_tokens = 0;
    context.pass.il = Pass::none;
    return store_.shared.forked() || store_.events.on() ||
           store_.tiers.any([](const Tier & tier) { return !tier.numbering.resident() || !tier.complete(); });
}

void Acquire::announce_tokens(Context & context, const moegguf_tokens_event & event) {
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
    if (store_.forecaster.on()) {
        store_.forecaster.announce({event.n_tokens, event.sequence, event.sequences, event.tokens},
                                   get(store_.shared.counters.passes) + 1);
    }
    if (store_.events.on()) { store_.events.tokens(event); }
}

// Sizes of pools.

void Acquire::resize(Tier & tier, int n_slots) {
    Lock lock(store_.shared.mutex);
    if (!changes_size(tier, n_slots)) { return; }
    end_layer(store_.context); // pins of the last layer of a pass that has ended
    store_.staged->drop_ahead();
    store_.transfers.forget(Cause::request);
    store_.transfers.hold_prefetches(true);
    const auto & tiers = store_.tiers.all;
    const auto quiet = [&] { return std::none_of(tiers.begin(), tiers.end(), [](Tier * of) { return of->busy(); }); };
    const bool ended = store_.shared.wait_regardless(lock, quiet, std::chrono::steady_clock::now() + longest_reads);
    store_.transfers.hold_prefetches(false);
    if (!ended) { throw Error(MOEGGUF_IO, "experts were still being read after a minute; try again"); }
    tier.resize(std::min(n_slots, tier.residency.n_usable())); // what is to go is not kept in new memory
    tier.resize(tier.reallocate(n_slots));
}

// Layers of which every expert is there.

bool Acquire::idle(int il) const {
    if (store_.shared.forked() || !store_.layout.has_experts(il)) { return false; }
    const Tier & tier = store_.tiers.of(il);
    return tier.numbering.resident() && tier.complete() && !store_.events.on() && !watched_ && !store_.shared.cancelled;
}

void Acquire::count_idle(Context & context, int il, int n_expert_used, int n_tokens) {
    count_pass(context, il, n_tokens);
    if (context.supply) {
        Lock lock(store_.shared.mutex);
        end_layer(context);
    }
    context.pinned.tier = &store_.tiers.of(il);
    LookUps(store_.tiers.of(il)).add_ready(std::min(n_expert_used * n_tokens, store_.layout.layers[il].n_expert));
}

} // namespace moegguf
