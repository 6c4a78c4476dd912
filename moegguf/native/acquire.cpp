#include "acquire.h"

#include "clock.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>

namespace moegguf {
namespace {

// From this many choices per expert on, a pass touches practically every expert (1 - e^-4 = 98 % of them).
constexpr int64_t sweep_choices_per_expert = 4;

// Slots that a layer is streamed through, at most: while one is multiplied with, readers fill the rest.
constexpr int most_streaming_slots = 8;

// How long a lane waits for another one's layer to end before it calls the pool too small for both.
constexpr auto longest_pass = std::chrono::seconds(60);

constexpr char parents_model[] = "the model was loaded in the parent process; load it again in this one";
constexpr char cancelled[] = "cancelled";

} // namespace

// Contexts that come and go, and their failures.

void Lane::fail(moegguf_status status, int il, int expert, const std::string & why) {
    if (failed) {
        return;
    }
    failure = {status, 0, il, expert, {}};
    snprintf(failure.message, sizeof(failure.message), "%s", why.c_str());
    failed = true;
}

// Sequence and phase of an event's tokens, of a pass of several sequences. The last layer may be computed for fewer
// tokens than the pass has: those whose logits are wanted.
bool Lane::gather(int n_event_tokens) {
    if (first_token < 0 || sequences.empty()) {
        return false;
    }
    event_sequences.clear();
    event_phases.clear();
    for (int i = first_token; i < first_token + n_tokens; i++) {
        if (n_event_tokens == n_tokens || outputs[i]) {
            event_sequences.push_back(sequences[i]);
            event_phases.push_back(phases[i]);
        }
    }
    return (int)event_sequences.size() == n_event_tokens;
}

// Whether the pass decodes one token of each of several sequences, as announced.
bool Lane::has_one_token_each() const {
    bool found = first_token >= 0 && !sequences.empty();
    for (int i = first_token; found && i < first_token + n_tokens; i++) {
        found = phases[i] == MOEGGUF_DECODE && (i == first_token || sequences[i] != sequences[i - 1]);
    }
    return found;
}

bool Lane::staged() const {
    return tier->id == TierId::staging;
}

std::unique_ptr<Lane> Acquire::open_lane() {
    Lock lock(shared_.mutex);
    auto lane = std::make_unique<Lane>(store_, *tiers_.compute[0], lane_ids_, layout_.n_expert_max);
    lane_ids_ += 1;
    lanes_.push_back(lane.get());
    return lane;
}

void Acquire::close_lane(Lane & lane) {
    Lock lock(shared_.mutex);
    streaming_.stop(lane);
    missed_.forget(lane);
    unpin(lane);
    lanes_.erase(std::find(lanes_.begin(), lanes_.end(), &lane));
    shared_.done.notify_all();
}

bool Acquire::is_clear(const Lane & lane) const {
    return !lane.failed && lane.pinned.empty() && !lane.missed && !lane.streams_experts && noted(lane) &&
           !shared_.forked();
}

void Acquire::take_failure(Lane & lane, moegguf_failure & out, bool clear) {
    if (shared_.forked()) {
        out = lane.failure; // the lock may be held by a thread of the parent
        return;
    }
    Lock lock(shared_.mutex);
    note_ordered(lane, lock);
    note_failures(lane);
    out = lane.failed ? lane.failure : moegguf_failure{};
    if (clear) {
        lane.failure = {};
        lane.failed = false;
        lane.il = Lane::between_passes;
        streaming_.stop(lane);
        missed_.forget(lane);
        unpin(lane);
    }
}

// Whether the tokens that come next have to be announced; those before are forgotten. No lock. Of a pool that has every
// expert nothing is predicted.
bool Acquire::awaits_tokens(Lane & lane, int sequence, int phase) {
    lane.sequence = sequence;
    lane.phase = phase;
    lane.next_token = lane.n_announced = 0;
    lane.il = Lane::between_passes;
    return shared_.forked() || events_.on() || tiers_.any([](const Tier & tier) {
        return tier.resize_to != 0 || !tier.numbering.resident() || !tier.complete();
    });
}

void Acquire::announce_tokens(Lane & lane, const moegguf_tokens_event & event) {
    lane.sequence = event.sequence;
    lane.phase = event.phase;
    lane.next_token = 0;
    lane.n_announced = event.n_tokens;
    const int n_batched = event.sequences ? event.n_tokens : 0;
    lane.sequences.assign(event.sequences, event.sequences + n_batched);
    lane.phases.assign(event.phases, event.phases + n_batched);
    lane.outputs.assign(event.outputs, event.outputs + n_batched);
    lane.il = Lane::between_passes;
    if (forecaster_.on()) {
        forecaster_.announce({event.n_tokens, event.sequence, event.sequences, event.tokens},
                             get(shared_.counters.passes) + 1);
    }
    if (events_.on()) {
        events_.tokens(event);
    }
}

// The barrier: routing events.

void Acquire::acquire(Lane & lane, int il, int32_t * ids, int n_expert_used, int n_tokens, uint8_t wait_kinds,
                      const Routed & routed) {
    const uint64_t start = now_ns();
    const size_t n = (size_t)n_expert_used * n_tokens;
    if (shared_.forked()) { // a thread of the parent may hold the lock
        lane.fail(MOEGGUF_FORKED, il, -1, parents_model);
        std::fill_n(ids, n, 0);
        return;
    }
    events_.keep_step();
    forecaster_.settle();
    lane.waited_ns = 0;
    if (!layout_.has_experts(il)) {
        lane.fail(MOEGGUF_ROUTING, il, -1, "a layer without experts was routed");
    }
    const bool valid = !lane.failed && collect(lane, il, ids, n);
    bool placed = false, only_copies = false;
    int first_slot = 0;
    {
        Lock lock(shared_.mutex);
        begin_pass(lane, il, n_tokens, lock);
        if (valid && !lane.failed) {
            const int64_t n_expert = layout_.layers[il].n_expert;
            const bool nearly_all = n_tokens > 1 && (int64_t)n >= sweep_choices_per_expert * n_expert;
            lane.n_experts += (int)lane.distinct.size();
            const uint64_t turn = lane.pass * layout_.layers.size() + il;
            lane.tier = &tiers_.of(il, n_tokens);
            lane.stream = lane.staged() ? nullptr : lane.stream;
            lane.ids_memory = ids;
            lane.streams_experts = must_stream(lane, n_tokens, wait_kinds);
            const Moment now = {il, nearly_all || lane.cycles, lane.n_tokens == 1, turn, lane.decodes};
            placed = fill_slots(lane, now, ids, n_expert_used, n_tokens, lock);
            if (placed && nearly_all && shared_.has(MOEGGUF_SWEEP) && !lane.staged()) {
                sweep_ahead(il);
            }
            first_slot = lane.tier->numbering.window(il).first_slot;
            only_copies = lane.stream && placed && !awaits_file(lane, all_kinds);
        }
    }
    const bool batched = (forecaster_.on() || events_.on()) && lane.gather(n_tokens);
    if (placed && forecaster_.on()) {
        const PassTokens of = {n_tokens, lane.sequence, batched ? lane.event_sequences.data() : nullptr};
        const float * inputs = forecaster_.wants_inputs(n_tokens) ? routed.inputs : nullptr;
        forecaster_.routing(il, of, ids, n_expert_used, inputs, routed.n_embd, lane.pass);
    }
    if (events_.on()) {
        // Victims are chosen before the listener gets this event, so that its scores act from the next one on. This
        // may wait for space in the ring, which the listener may need the lock to make: it is not held here.
        events_.routing(
            {lane.pass, start, lane.id, il, n_tokens, n_expert_used, lane.sequence, lane.phase, lane.first_token,
             routed.n_embd, ids, routed.weights, events_.wants_inputs(n_tokens) ? routed.inputs : nullptr,
             batched ? lane.event_sequences.data() : nullptr, batched ? lane.event_phases.data() : nullptr});
    }
    const bool models_missed = placed && lane.missed && shared_.simulated();
    if (models_missed) {
        Lock lock(shared_.mutex);
        missed_.begin_modelled(lane);
    }
    if (placed) {
        // A stream waits for copies, so the layer need not stop again.
        wait(lane, only_copies || lane.staged() ? all_kinds : wait_kinds);
    }
    if (placed && lane.staged() && !lane.failed) {
        Lock lock(shared_.mutex);
        staging_.finish(lane, ids, n_expert_used, n_tokens, lock);
    }
    write_slot_ids(lane, ids, n_expert_used, n, first_slot);
    if (models_missed) {
        Lock lock(shared_.mutex);
        missed_.end_modelled(lane);
    }
    count(shared_.counters.hook_ns, now_ns() - start - lane.waited_ns);
}

void Acquire::write_slot_ids(const Lane & lane, int32_t * ids, int n_expert_used, size_t n, int first_slot) const {
    int n_stood_in = 0;
    for (size_t i = 0; i < n; i++) {
        n_stood_in = i % n_expert_used == 0 ? 0 : n_stood_in; // a token's are distinct
        if (lane.failed) {
            ids[i] = 0;
        } else if (!lane.streams_experts) {
            const int s = lane.slot_of[ids[i]];
            ids[i] = (s == Lane::computed_below ? lane.stand_ins[n_stood_in++] : s) - first_slot;
        }
    }
}

bool Acquire::collect(Lane & lane, int il, const int32_t * ids, size_t n) {
    const int n_expert = layout_.layers[il].n_expert;
    for (int expert : lane.distinct) { // of the event before, also where memory did not suffice for it
        lane.slot_of[expert] = Lane::not_chosen;
    }
    lane.distinct.clear();
    for (size_t i = 0; i < n; i++) {
        const int expert = ids[i];
        if (expert < 0 || expert >= n_expert) {
            lane.fail(MOEGGUF_ROUTING, il, expert,
                      "the router chose expert " + std::to_string(expert) + " of " + std::to_string(n_expert));
            return false;
        }
        if (lane.slot_of[expert] == Lane::not_chosen) {
            lane.slot_of[expert] = Lane::no_slot_yet;
            lane.distinct.push_back(expert);
        }
    }
    return true;
}

// A slot for every expert of the event, and a transfer for every matrix that is not there.
bool Acquire::fill_slots(Lane & lane, const Moment & now, const int32_t * ids, int n_expert_used, int n_tokens,
                         Lock & lock) {
    lane.chunks = layout_.layers[now.il].chunks;
    transfers_.set_moment(now);
    Residency & residency = tiers_.of(now.il).residency;
    residency.on_forecast(now.il, nullptr); // the router has chosen: what was predicted does not count any more
    staging_.note_pass(lane, n_tokens);
    missed_.note_uses(lane, now.il);
    if (lane.staged()) {
        residency.on_routing(now.il, ids, n_expert_used, n_tokens);
        return staging_.place(lane, now, lock);
    }
    staging_.drop_ahead(lock);
    if (!pin_all(lane, now, ids, n_expert_used, n_tokens, lock)) {
        return false;
    }
    residency.on_routing(now.il, ids, n_expert_used, n_tokens);
    transfers_.demand(*lane.tier, lane.pinned);
    return true;
}

void Acquire::count_pass(Lane & lane, int il, int n_tokens) {
    Counters & counters = shared_.counters;
    if (il <= lane.il) {
        lane.pass = __atomic_add_fetch(&counters.passes, 1, __ATOMIC_RELAXED);
        lane.cycles = shared_.has(MOEGGUF_SWEEP) && n_tokens > 1 && lane.n_tokens > 1 && lane.n_experts > n_usable();
        lane.n_experts = 0;
        lane.n_tokens = n_tokens;
        count(counters.tokens, n_tokens);
        lane.first_token = lane.next_token + n_tokens <= lane.n_announced ? lane.next_token : -1;
        lane.next_token = std::min(lane.next_token, lane.n_announced) + n_tokens;
        lane.decodes = n_tokens == 1 || lane.has_one_token_each();
    }
    lane.il = il;
    count(counters.routing_events);
}

// What a stream waited for has been copied, or has failed, as that layer is computed: only the thread that copies may
// not have said so yet. Neither what the next layer evicts nor whether the pass has failed depends on that.
void Acquire::note_ordered(Lane & lane, Lock & lock) {
    const auto noted = [&](int s) { return !(lane.tier->residency.slot(s).reading & lane.ordered); };
    shared_.done.wait(lock, [&] {
        return shared_.cancelled || shared_.stopping || std::all_of(lane.pinned.begin(), lane.pinned.end(), noted);
    });
    lane.ordered = 0;
}

void Acquire::begin_pass(Lane & lane, int il, int n_tokens, Lock & lock) {
    computing_ = true;
    if (lane.missed && il > lane.il) {
        lane.fail(MOEGGUF_INVALID, lane.il, -1, "experts that the CPU has computed did not reach the layer's output");
    }
    missed_.forget(lane);
    count_pass(lane, il, n_tokens);
    note_ordered(lane, lock);
    note_failures(lane);
    streaming_.stop(lane);
    unpin(lane);
    lane.tier = layout_.has_experts(il) ? &tiers_.of(il) : lane.tier;
    for (auto & tier : tiers_.compute) {
        if (tier->resize_to > 0) {
            staging_.drop_ahead();
            apply_resize(*tier);
        }
    }
}

// Slots of all devices.
int Acquire::n_usable() const {
    int n = 0;
    for (const auto & tier : tiers_.compute) {
        n += tier->residency.n_usable();
    }
    return n;
}

// Residents are pinned before any victim is chosen, so that no needed expert is evicted for another.
bool Acquire::pin_all(Lane & lane, const Moment & now, const int32_t * ids, int n_expert_used, int n_tokens,
                      Lock & lock) {
    // A lane that waits for slots holds some already. Another one that did the same could block both for good.
    const Deadline deadline = std::chrono::steady_clock::now() + longest_pass;
    while ((short_of_slots_ || (lane.streams_experts && streaming_.busy())) && !shared_.cancelled) {
        if (shared_.done.wait_until(lock, deadline) == std::cv_status::timeout) {
            fail_without_slot(lane, now.il, lane.distinct[0]);
            return false;
        }
    }
    pin_present(lane, now.il,
                lane.streams_experts ? lane.tier->residency.n_usable() - slots_to_stream(lane) : INT32_MAX);
    if (shared_.has(MOEGGUF_PREEMPT) && !lane.tier->numbering.resident()) {
        transfers_.drop_prefetches(now.il);
    }
    missed_.choose(lane, now, ids, n_expert_used, n_tokens);
    const uint64_t start = shared_.clock_ns();
    bool done = false;
    try {
        done = lane.streams_experts ? stream_absent(lane, now, lock) : pin_absent(lane, now, lock);
    } catch (...) {
        end_shortage(lane, start);
        throw;
    }
    end_shortage(lane, start);
    return done;
}

// Lets other lanes and prefetches take slots again, if this lane has waited for some.
void Acquire::end_shortage(Lane & lane, uint64_t since_ns) {
    if (short_of_slots_) {
        short_of_slots_ = false;
        transfers_.hold_prefetches(false);
        shared_.done.notify_all();
        count_stall(lane, since_ns);
    }
}

// The others count as absent.
void Acquire::pin_present(Lane & lane, int il, int most) {
    Residency & residency = lane.tier->residency;
    uint64_t n_ready = 0, n_late = 0, n_useful = 0;
    for (int expert : lane.distinct) {
        residency.count_look_up(il, expert);
        const int s = residency.find(il, expert);
        if (s < 0 || (int)lane.pinned.size() >= most) {
            continue;
        }
        (residency.complete(s) ? n_ready : n_late) += 1;
        n_useful += residency.request(s);
        if (residency.failed(s) && computes_with(*lane.tier, s)) {
            lane.fail(MOEGGUF_IO, il, expert, transfers_.error());
        } else if (residency.failed(s)) {
            residency.forgive(s); // for passes that have ended: this one reads again
        }
        residency.pin(s);
        lane.pinned.push_back(s);
        lane.slot_of[expert] = s;
    }
    Counters & counters = lane.tier->counters;
    count(counters.lookups, lane.distinct.size());
    count(counters.hits_ready, n_ready);
    count(counters.hits_late, n_late);
    count(counters.misses, lane.distinct.size() - n_ready - n_late);
    count(shared_.counters.prefetch_useful, n_useful);
}

// Whether a lane whose pass has not failed yet pins a slot. It must find the failure of its read there.
bool Acquire::computes_with(const Tier & tier, int s) const {
    return std::any_of(lanes_.begin(), lanes_.end(), [&tier, s](const Lane * lane) {
        return !lane->failed && lane->tier == &tier &&
               std::find(lane->pinned.begin(), lane->pinned.end(), s) != lane->pinned.end();
    });
}

bool Acquire::pin_absent(Lane & lane, const Moment & now, Lock & lock) {
    Tier & tier = *lane.tier;
    const auto fits = [&] { return (int)lane.distinct.size() <= tier.residency.n_usable(); };
    for (int expert : lane.distinct) {
        if (lane.slot_of[expert] != Lane::no_slot_yet) {
            continue;
        }
        const int s = wait_for_slot([&] { return tier.take_slot(now.il, expert, now); }, fits, lock);
        if (s < 0) {
            fail_without_slot(lane, now.il, expert);
            return false;
        }
        tier.residency.pin(s);
        lane.pinned.push_back(s);
        lane.slot_of[expert] = s;
    }
    if (!missed_.find_stand_ins(lane)) {
        fail_without_slot(lane, now.il, lane.distinct[0]);
        return false;
    }
    return true;
}

void Acquire::fail_without_slot(Lane & lane, int il, int expert) {
    lane.fail(shared_.cancelled ? MOEGGUF_CANCELLED : MOEGGUF_SLOTS, il, expert,
              "one pass needs " + std::to_string(lane.distinct.size()) + " experts of layer " + std::to_string(il) +
                  " at once, the pool has " + std::to_string(lane.tier->residency.n_usable()) + " slots");
}

// Whether experts pass through slots instead of getting one each: where they do not fit, or where that is asked for. A
// caller that waits for matrices here cannot be given some of them at a time.
bool Acquire::must_stream(const Lane & lane, int n_tokens, uint8_t wait_kinds) const {
    const bool asked = shared_.simulated() || (wait_kinds == 0 && lane.ids_in_place); // kernels ask for these ids
    const Tier & tier = *lane.tier;
    const bool can = asked && streaming_.possible(tier) && !tier.below();
    const bool fits = (int)lane.distinct.size() <= tier.residency.n_usable();
    return can && !tier.numbering.resident() && n_tokens > 1 && (!fits || shared_.has(MOEGGUF_STREAM));
}

// Half of a small pool, so that what is there of the layer is not read again.
int Acquire::slots_to_stream(const Lane & lane) const {
    const int n_usable = lane.tier->residency.n_usable(), half = std::max(2, n_usable / 2);
    return std::min({most_streaming_slots, half, n_usable, (int)lane.distinct.size()});
}

// At least one slot for the experts that are absent, and more as there are some.
bool Acquire::stream_absent(Lane & lane, const Moment & now, Lock & lock) {
    std::vector<int> & absent = lane.absent;
    absent.clear();
    std::copy_if(lane.distinct.begin(), lane.distinct.end(), std::back_inserter(absent),
                 [&](int expert) { return lane.slot_of[expert] < 0; });
    if (absent.empty()) {
        lane.streams_experts = false;
        return true;
    }
    const size_t n_pinned = lane.pinned.size(), n_wanted = std::min<size_t>(absent.size(), slots_to_stream(lane));
    const auto reserve = [&] { return lane.tier->reserve_slot(now.il, now); };
    int s = shared_.cancelled ? -1 : wait_for_slot(reserve, [] { return true; }, lock);
    while (s >= 0) {
        lane.tier->residency.pin(s);
        lane.pinned.push_back(s);
        s = lane.pinned.size() < n_pinned + n_wanted ? reserve() : -1;
    }
    if (lane.pinned.size() == n_pinned) {
        fail_without_slot(lane, now.il, absent[0]);
        return false;
    }
    streaming_.begin(lane, now.il, n_pinned);
    transfers_.wake_readers();
    if (shared_.simulated()) {
        const uint64_t start = shared_.clock_ns();
        while (streaming_.busy()) {
            transfers_.step();
        }
        count_stall(lane, start);
    }
    return true;
}

// What `take` returns, once it finds a slot; -1 when it will not, or when it is no longer `worth` waiting.
template <typename Take, typename Worth>
int Acquire::wait_for_slot(Take take, Worth worth, Lock & lock) {
    Deadline deadline{};
    int s = take();
    while (s < 0 && worth()) { // another lane may shrink the pool
        if (deadline == Deadline{}) {
            deadline = std::chrono::steady_clock::now() + longest_pass;
        }
        if (!wait_for_change(deadline, lock)) {
            break;
        }
        s = take();
    }
    return s;
}

// False when no slot will become free: transfers end, and another lane unpins at its next routing event, nothing else.
bool Acquire::wait_for_change(Deadline deadline, Lock & lock) {
    if (shared_.simulated() && transfers_.reading()) {
        transfers_.step();
        return true;
    }
    if (shared_.cancelled || (lanes_.size() == 1 && !transfers_.reading())) {
        return false;
    }
    short_of_slots_ = true;
    transfers_.hold_prefetches(true);
    return shared_.done.wait_until(lock, deadline) == std::cv_status::no_timeout;
}

void Acquire::sweep_ahead(int il) {
    const int n_layer = (int)layout_.layers.size();
    int next = il + 1;
    while (next < n_layer && layout_.layers[next].n_expert == 0) {
        next++;
    }
    if (next == n_layer) {
        return;
    }
    const Tier & tier = tiers_.of(next);
    const int n_busy = &tier == &tiers_.of(il) ? layout_.layers[il].n_expert : 0;
    int free_slots = tier.residency.n_usable() - n_busy;
    for (int expert = 0; expert < layout_.layers[next].n_expert && free_slots > 0; expert++, free_slots--) {
        if (tier.residency.find(next, expert) < 0) {
            count(shared_.counters.prefetch_requested);
            if (!transfers_.prefetch(next, expert)) {
                count(shared_.counters.prefetch_dropped);
            }
        }
    }
    transfers_.wake_readers();
}

// What a pass leaves: pins, and a size of the pool that was asked for meanwhile.

void Acquire::unpin(Lane & lane) {
    for (int s : lane.pinned) {
        lane.tier->unpin(s);
    }
    lane.pinned.clear();
    if (lanes_.size() > 1) {
        shared_.done.notify_all();
    }
}

void Acquire::resize(Tier & tier, int n_slots) {
    Lock lock(shared_.mutex);
    if (tier.id == TierId::staging) {
        throw Error(MOEGGUF_INVALID, "staging tensors keep the size of a layer");
    }
    const bool computes = tier.id == TierId::compute;
    const int least = computes ? tier.pass_slots : 1, most = tier.residency.n_slots();
    if (n_slots < least || n_slots > most) {
        throw Error(MOEGGUF_INVALID, "the tier can have " + std::to_string(least) + " to " + std::to_string(most) +
                                         " slots, not " + std::to_string(n_slots));
    }
    if (!computes) {
        tier.resize(n_slots);
        return;
    }
    if (tier.numbering.resident() && lanes_.size() > 1) {
        throw Error(MOEGGUF_INVALID, "a fully resident pool with several contexts keeps its size");
    }
    tier.resize_to = n_slots;
    if (!computing_) {
        apply_resize(tier); // later, only at a routing event is it certain that no layer is being computed
    }
}

void Acquire::reallocate(Tier & tier, int n_slots) {
    Lock lock(shared_.mutex);
    if (tier.id == TierId::staging) {
        throw Error(MOEGGUF_INVALID, "staging tensors keep the size of a layer");
    }
    const bool computes = tier.id == TierId::compute;
    const int least = computes ? tier.pass_slots : 1, most = tier.residency.n_slots();
    if (n_slots < least || n_slots > most) {
        throw Error(MOEGGUF_INVALID, "the tier can have " + std::to_string(least) + " to " + std::to_string(most) +
                                         " slots, not " + std::to_string(n_slots));
    }
    if (computes && tier.numbering.resident()) {
        if (lanes_.size() > 1 && n_slots < most) {
            throw Error(MOEGGUF_INVALID, "a fully resident pool with several contexts keeps its size");
        }
        if (n_slots == most) {
            return;
        }
    }
    for (Lane * lane : lanes_) { // pins of the last layer of a pass that has ended
        streaming_.stop(*lane);
        missed_.forget(*lane);
        unpin(*lane);
    }
    staging_.drop_ahead();
    tier.resize_to = 0;
    tier.resize(std::min(n_slots, tier.residency.n_usable()));
    transfers_.drop_requests();
    transfers_.hold_prefetches(true);
    const auto quiet = [&] {
        const auto reading = [](const auto & of) { return of && of->reading(); };
        return !tiers_.any([](const Tier & of) { return of.reading(); }) && !reading(tiers_.below) &&
               std::none_of(tiers_.staging.begin(), tiers_.staging.end(), reading) && !missed_.busy();
    };
    const bool ended = shared_.simulated() || shared_.done.wait_for(lock, longest_pass, quiet);
    transfers_.hold_prefetches(false);
    if (!ended) {
        throw Error(MOEGGUF_IO, "experts were still being read after a minute; try again");
    }
    tier.resize(tier.reallocate(n_slots));
}

void Acquire::apply_resize(Tier & tier) {
    if (tier.numbering.resident() && lanes_.size() > 1) {
        return; // a context that came meanwhile computes with slot ids of its layers' windows
    }
    tier.resize(tier.resize_to);
    tier.resize_to = 0; // after the numbering: idle() looks here first
}

// Whether a layer's matrices are there, and waiting until they are; by atomics where nothing is to be done.

// Every matrix in `kinds` of every pinned slot is there, and none failed.
bool Acquire::available(const Lane & lane, uint8_t kinds) const {
    return std::all_of(lane.pinned.begin(), lane.pinned.end(),
                       [&](int s) { return !missing(lane, s, kinds) && !lane.tier->residency.failed(s); });
}

// Every such matrix is there, or will not come.
bool Acquire::settled(const Lane & lane, uint8_t kinds) const {
    return std::all_of(lane.pinned.begin(), lane.pinned.end(),
                       [&](int s) { return !missing(lane, s, kinds) || lane.tier->residency.failed(s); });
}

uint8_t Acquire::missing(const Lane & lane, int s, uint8_t kinds) const {
    const Tier & tier = *lane.tier;
    if (tier.residency.slot(s).streams()) {
        return 0; // readers know what comes there
    }
    const uint8_t submitted = lane.stream ? tier.copies->submitted(s) : 0; // before they are ready: no gap between both
    return lane.chunks & kinds & ~submitted & ~tier.residency.ready(s);
}

// A failure counts as pending, so that wait() is called and ends the pass.
bool Acquire::pending(const Lane & lane, uint8_t kinds) const {
    const auto is_there = [&](int s) {
        const Residency & residency = lane.tier->residency;
        return !(lane.chunks & kinds & ~lane.ordered & ~residency.ready(s)) && !residency.failed(s);
    };
    return !shared_.forked() && !lane.failed && !std::all_of(lane.pinned.begin(), lane.pinned.end(), is_there);
}

void Acquire::wait(Lane & lane, uint8_t kinds) {
    if (shared_.forked()) {
        return;
    }
    if (available(lane, kinds) && !shared_.cancelled) {
        order(lane, kinds);
        return;
    }
    Lock lock(shared_.mutex);
    const uint64_t start = shared_.clock_ns();
    uint64_t file_done = start; // until then something was still in the file
    while (!settled(lane, kinds) && !shared_.cancelled && !shared_.stopping) {
        const bool from_file = lane.tier->below() && awaits_file(lane, kinds);
        if (shared_.simulated()) {
            transfers_.step();
        } else {
            shared_.done.wait(lock);
        }
        file_done = from_file ? shared_.clock_ns() : file_done;
    }
    count_stall(lane, start);
    if (Tier * below = lane.tier->below()) {
        count(below->counters.stall_ns, file_done - start);
    }
    if (shared_.cancelled) {
        lane.fail(MOEGGUF_CANCELLED, lane.il, -1, cancelled);
    }
    note_failures(lane);
    lock.unlock();
    order(lane, kinds);
}

// The stream that computes waits for matrices whose copies are under way.
void Acquire::order(Lane & lane, uint8_t kinds) {
    if (lane.stream && kinds && !lane.failed) {
        lane.tier->copies->order(lane.stream);
        lane.ordered |= kinds;
    }
}

void Acquire::note_failures(Lane & lane) {
    lane.read_errors = get(shared_.counters.read_errors);
    const uint64_t given_up = shared_.given_up;
    if (lane.given_up != given_up && !lane.pinned.empty()) { // also when it was allowed again since
        lane.fail(MOEGGUF_CANCELLED, lane.il, -1, cancelled);
    }
    lane.given_up = given_up;
    for (int s : lane.pinned) {
        if (lane.tier->residency.failed(s)) {
            const Slot & slot = lane.tier->residency.slot(s);
            lane.fail(MOEGGUF_IO, slot.il, slot.expert, transfers_.error());
        }
    }
}

void Acquire::note_new_failures(Lane & lane) {
    if (!lane.failed && !shared_.forked()) {
        Lock lock(shared_.mutex);
        note_failures(lane);
    }
}

bool Acquire::awaits_file(const Lane & lane, uint8_t kinds) const {
    return std::any_of(lane.pinned.begin(), lane.pinned.end(),
                       [&](int s) { return transfers_.awaits_file(*lane.tier, s, lane.chunks & kinds); });
}

void Acquire::count_stall(Lane & lane, uint64_t since_ns) {
    const uint64_t stall_ns = shared_.clock_ns() - since_ns;
    moegguf::count_stall(shared_, *lane.tier, stall_ns);
    lane.waited_ns += shared_.simulated() ? 0 : stall_ns;
}

// computing_ before resize_to, which resize() does the other way round: one of the two sees the other. And resize_to
// before the numbering, which apply_resize() changes first.
bool Acquire::idle(int il) {
    if (shared_.forked()) {
        return false;
    }
    if (!computing_) {
        computing_ = true;
    }
    if (!layout_.has_experts(il)) {
        return false;
    }
    const Tier & tier = tiers_.of(il);
    return tier.resize_to == 0 && tier.numbering.resident() && tier.complete() && !events_.on() && !watched_ &&
           !shared_.cancelled;
}

void Acquire::count_idle(Lane & lane, int il, int n_expert_used, int n_tokens) {
    count_pass(lane, il, n_tokens);
    if (!lane.pinned.empty()) {
        Lock lock(shared_.mutex);
        unpin(lane);
    }
    lane.tier = &tiers_.of(il);
    const int n_experts = std::min(n_expert_used * n_tokens, layout_.layers[il].n_expert);
    count(lane.tier->counters.lookups, n_experts);
    count(lane.tier->counters.hits_ready, n_experts);
}

} // namespace moegguf
