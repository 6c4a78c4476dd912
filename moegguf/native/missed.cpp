#include "missed.h"

#include "clock.h"
#include "fault.h"
#include "short_slices.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <system_error>

namespace moegguf {
namespace {

// A moving average of times that others may disturb, and of which few come while something else is faster: one that is
// far longer counts as four times the average, and one of less than half pulls it down at once.
void follow(double & mean_ns, double ns) {
    if (ns < mean_ns / 2) {
        mean_ns = (mean_ns + ns) / 2;
    } else {
        fade_in(mean_ns, mean_ns > 0 ? std::min(ns, 4 * mean_ns) : ns);
    }
}

} // namespace

Missed::~Missed() {
    {
        Lock lock(shared_.mutex);
        stopping_ = true;
    }
    work_.notify_all();
    shared_.done.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
}

void Missed::check_tiers(bool possible) const {
    const auto has_lower = [](const Tier & tier) { return tier.below() != nullptr; };
    if (!possible || !tiers_.any(has_lower)) {
        throw Error(MOEGGUF_INVALID,
                    "misses can be computed where a device has slots over slots in RAM, by a thread"
                    " at least");
    }
}

void Missed::start(int n_threads) {
    check_tiers(!shared_.simulated() && n_threads > 0);
    Lock lock(shared_.mutex);
    if (on_) {
        return;
    }
    backend_ = make_backend(find_device(nullptr), n_threads);
    admission_.start();
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::system_error & e) {
        throw Error(MOEGGUF_MEMORY, std::string("cannot start the thread that computes misses: ") + e.what());
    }
    on_ = true;
}

void Missed::start_modelled(double bytes_per_ns, double layer_ns) {
    check_tiers(shared_.simulated() && bytes_per_ns > 0 && layer_ns >= 0);
    Lock lock(shared_.mutex);
    admission_.start();
    bytes_ns_ = 1 / bytes_per_ns;
    start_ns_ = layer_ns;
    on_ = true;
}

bool Missed::serves(int il, int n_tokens) const {
    return on_ && n_tokens <= most_tokens && tiers_.of(il).below();
}

// Graphs are built again and again, with few chains.
const ExpertChain * Missed::keep(ExpertChain chain) {
    std::lock_guard<std::mutex> lock(chains_mutex_);
    const auto known = std::find_if(chains_.begin(), chains_.end(), [&](const auto & one) { return *one == chain; });
    if (known != chains_.end()) {
        return known->get();
    }
    chain.read_rows();
    return chains_.emplace_back(std::make_unique<const ExpertChain>(std::move(chain))).get();
}

void Missed::set_layers(int n_layers, const std::string & note) {
    Lock lock(shared_.mutex);
    n_layers_ = n_layers;
    note_ = note;
}

void Missed::info(moegguf_computed & out) {
    Lock lock(shared_.mutex);
    out = {};
    out.misses = n_computed_;
    out.compute_ns = compute_ns_;
    out.stall_ns = stall_ns_;
    out.compute_bytes_ns = bytes_ns_;
    for (const auto & tier : tiers_.compute) {
        out.copy_bytes_ns = std::max(out.copy_bytes_ns, tier->copies ? tier->copies->bytes_ns() : 0.0);
    }
    out.n_layers = n_layers_;
    snprintf(out.note, sizeof(out.note), "%s", note_.c_str());
}

// The router's choice.

void Missed::note_uses(const Lane & lane, int il) {
    if (on_) {
        admission_.note_uses(il, lane.distinct, get(shared_.counters.tokens));
    }
}

void Missed::choose(Lane & lane, const Moment & now, const int32_t * ids, int n_expert_used, int n_tokens) {
    const Tier & tier = *lane.tier;
    const bool possible = lane.chain || shared_.simulated();
    if (!serves(now.il, n_tokens) || !possible || tier.numbering.resident()) {
        return;
    }
    missing_.clear();
    std::copy_if(lane.distinct.begin(), lane.distinct.end(), std::back_inserter(missing_),
                 [&](int expert) { return lane.slot_of[expert] == Lane::no_slot_yet; });
    const bool takes_none = tier.residency.has_free(); // of another expert
    const auto admitted = [&](int expert) { return takes_none || admission_.admits(now.il, expert); };
    const auto first_to_share = std::stable_partition(missing_.begin(), missing_.end(),
                                                      [&](int expert) { return comes_as_fast(now.il, expert); });
    std::stable_partition(first_to_share, missing_.end(), admitted);
    const int n_missed = (int)missing_.size();
    const int n_copies = count_fastest(now.il, int(first_to_share - missing_.begin()), n_missed);
    if (n_copies == n_missed) {
        measure(lane, now.il, n_expert_used);
        return;
    }
    for (int i = 0; i < n_copies; i++) { // what they are copied from makes no room for those that follow
        if (const int r = tier.below()->residency.find(now.il, missing_[i]); r >= 0) {
            tier.below()->residency.touch(r);
        }
    }
    MissedJob & job = new_job(lane, now.il, n_expert_used);
    for (int i = n_missed - 1; i >= n_copies; i--) { // first uses first
        const int expert = missing_[i];
        if (!take(job, now, expert, ids, n_expert_used * n_tokens)) {
            continue;
        }
        lane.slot_of[expert] = Lane::computed_below;
        if (admitted(expert)) { // a slot when the link is free
            count(shared_.counters.prefetch_requested);
            if (!transfers_.prefetch(now.il, expert)) {
                count(shared_.counters.prefetch_dropped);
            }
        }
    }
    transfers_.wake_readers();
    if (job.experts.empty()) {
        forget(lane);
    }
}

// Whether an expert is there no later by a copy, where it is still to be read: that goes on matrix by matrix meanwhile,
// and the processor begins when all have come.
bool Missed::comes_as_fast(int il, int expert) const {
    const Residency & below = tiers_.below->residency;
    const int r = below.find(il, expert);
    const double last_ns = tiers_.of(il).copies->bytes_ns() / __builtin_popcount(layout_.layers[il].chunks);
    return (r < 0 || !below.complete(r)) && bytes_ns_ >= last_ns;
}

// Of a layer's misses, so many copies, `least` or more, that link and processor end as soon as they can side by side.
int Missed::count_fastest(int il, int least, int n_missed) const {
    const double expert_ns = (double)expert_bytes(il), copy_ns = expert_ns * tiers_.of(il).copies->bytes_ns();
    const auto layer_ns = [&](int n) {
        const int n_computed = n_missed - n;
        const double computed_ns = n_computed > 0 ? start_ns_ + n_computed * expert_ns * bytes_ns_ : 0;
        return std::max(n * copy_ns, computed_ns) + (n_computed > 0 ? write_ns_ : 0);
    };
    int best = least; // also while the processor's time is not known
    for (int n = least + 1; n <= n_missed && bytes_ns_ > 0; n++) {
        best = layer_ns(n) < layer_ns(best) ? n : best;
    }
    return best;
}

// Where copies are faster, the processor computes one of them as well now and then, for which nothing waits: its
// average stays that of today. That of copies does without: what is admitted is copied anyway.
void Missed::measure(Lane & lane, int il, int n_expert_used) {
    constexpr int events_between = 32;
    n_copied_ += !missing_.empty();
    const int r = missing_.empty() ? -1 : tiers_.below->residency.find(il, missing_.back());
    if (n_copied_ < events_between || shared_.simulated() || r < 0 || !tiers_.below->residency.complete(r)) {
        return;
    }
    n_copied_ = 0;
    MissedJob & job = new_job(lane, il, n_expert_used);
    job.measures = true;
    tiers_.below->residency.pin(r);
    job.choices.push_back(0); // any input takes as long
    job.experts.push_back({missing_.back(), r, 0, 1, false});
}

MissedJob & Missed::new_job(Lane & lane, int il, int n_expert_used) {
    const auto free = std::find_if(jobs_.begin(), jobs_.end(),
                                   [](const auto & job) { return !job->wanted && (!job->begun || job->done); });
    MissedJob & job = free == jobs_.end() ? *jobs_.emplace_back(std::make_unique<MissedJob>()) : **free;
    job.il = il;
    job.n_expert_used = n_expert_used;
    job.chain = lane.chain;
    job.experts.clear();
    job.choices.clear();
    job.wanted = true;
    job.begun = job.done = job.given_up = job.measures = false;
    job.failed_expert = -1;
    job.why.clear();
    lane.missed = &job;
    return job;
}

// False where no slot below can be had for it.
bool Missed::take(MissedJob & job, const Moment & now, int expert, const int32_t * ids, int n_choices) {
    Tier & below = *tiers_.below;
    int r = below.residency.find(now.il, expert);
    count(below.counters.lookups);
    count(r < 0                         ? below.counters.misses
          : below.residency.complete(r) ? below.counters.hits_ready
                                        : below.counters.hits_late);
    below.residency.count_look_up(now.il, expert);
    if (r < 0) {
        r = below.take_slot(now.il, expert, now);
    }
    if (r < 0) {
        return false;
    }
    below.residency.request(r);
    below.residency.forgive(r); // of passes that have ended
    below.residency.pin(r);
    transfers_.demand_below(r);
    const int first = (int)job.choices.size();
    for (int i = 0; i < n_choices; i++) {
        if (ids[i] == expert) {
            job.choices.push_back(i);
        }
    }
    job.experts.push_back({expert, r, first, (int)job.choices.size() - first, false});
    return true;
}

// Any slots that no expert of the event is in, as many as a token may need.
bool Missed::find_stand_ins(Lane & lane) const {
    lane.stand_ins.clear();
    if (!lane.missed || lane.missed->measures) {
        return true;
    }
    std::vector<int> & found = lane.stand_ins;
    const Residency & residency = lane.tier->residency;
    const size_t n_wanted = std::min<size_t>(lane.missed->experts.size(), lane.missed->n_expert_used);
    const auto among = [](const std::vector<int> & slots, int s) {
        return std::find(slots.begin(), slots.end(), s) != slots.end();
    };
    for (const bool quiet : {true, false}) { // rather those that nothing is written into
        for (int s = 0; s < residency.n_usable() && found.size() < n_wanted; s++) {
            if ((residency.slot(s).reading == 0) == quiet && !among(lane.pinned, s) && !among(found, s)) {
                found.push_back(s);
            }
        }
    }
    return found.size() == n_wanted;
}

void Missed::forget(Lane & lane) {
    if (!lane.missed) {
        return;
    }
    MissedJob & job = *lane.missed;
    lane.missed = nullptr;
    job.wanted = false;
    if (!job.begun) {
        release(job);
    }
}

void Missed::release(MissedJob & job) {
    for (const MissedJob::Expert & expert : job.experts) {
        tiers_.below->unpin(expert.slot);
    }
}

void Missed::begin(Lane & lane, const float * inputs, int n_embd, const float * weights, int n_tokens) {
    MissedJob & job = *lane.missed;
    const bool known = inputs && (weights || !job.chain->weights_input);
    if (!known && !job.measures) {
        lane.fail(MOEGGUF_INVALID, job.il, -1, "the layer's input cannot be read for the CPU");
        return;
    }
    if (!known) {
        Lock lock(shared_.mutex);
        forget(lane);
        return;
    }
    const size_t n_choices = (size_t)n_tokens * job.n_expert_used;
    job.n_embd = n_embd;
    job.inputs.assign(inputs, inputs + (size_t)n_tokens * n_embd);
    job.weights.assign(weights, weights + (weights ? n_choices : 0));
    job.rows.resize(n_choices * n_embd);
    job.queued_ns = now_ns();
    Lock lock(shared_.mutex);
    job.begun = true;
    queue_.push(&job);
    work_.notify_one();
    if (job.measures) {
        forget(lane);
    }
}

// The multiplication.

bool Missed::is_next(const Lane & lane, const ggml_tensor * t) const {
    return multiplies_down(t, lane.missed->il);
}

// Something that is to be computed is still in the file.
bool Missed::awaits_file(const MissedJob & job) const {
    const Residency & below = tiers_.below->residency;
    return std::any_of(job.experts.begin(), job.experts.end(), [&](const MissedJob::Expert & expert) {
        return !expert.computed && !below.complete(expert.slot);
    });
}

// A stall of the layer's device, and of the file's link as long as anything comes from there.
void Missed::wait(Lane & lane, const MissedJob & job, Lock & lock) {
    const uint64_t start = now_ns();
    uint64_t file_done = start;
    while (!lane.failed && !job.done && !shared_.cancelled) {
        const bool from_file = awaits_file(job);
        shared_.done.wait(lock);
        file_done = from_file ? now_ns() : file_done;
    }
    const uint64_t waited_ns = now_ns() - start;
    stall_ns_ += waited_ns;
    count_stall(shared_, *lane.tier, waited_ns);
    count(tiers_.below->counters.stall_ns, file_done - start);
}

void Missed::write(Lane & lane, ggml_tensor * t) {
    MissedJob & job = *lane.missed;
    if (shared_.forked()) {
        return;
    }
    Lock lock(shared_.mutex);
    wait(lane, job, lock);
    if (!job.done || job.given_up) {
        lane.fail(MOEGGUF_CANCELLED, job.il, -1, "cancelled");
    } else if (!job.why.empty()) {
        lane.fail(MOEGGUF_IO, job.il, job.failed_expert, job.why);
    }
    lock.unlock();
    const uint64_t start = now_ns();
    const auto chosen = [&](int i) {
        return std::find(job.choices.begin(), job.choices.end(), i) != job.choices.end();
    };
    const int n_choices = (int)(t->ne[1] * t->ne[2]);
    for (int i = 0; i < n_choices && !lane.failed;) { // neighbours in one copy
        int n = 0;
        while (i + n < n_choices && chosen(i + n)) {
            n++;
        }
        if (n > 0) {
            ggml_backend_tensor_set(t, job.rows.data() + (size_t)i * job.n_embd, i * t->nb[1], n * t->nb[1]);
        }
        i += n + 1;
    }
    lock.lock();
    follow(write_ns_, (double)(now_ns() - start));
    forget(lane);
}

// Simulation.

void Missed::begin_modelled(Lane & lane) {
    MissedJob & job = *lane.missed;
    const uint64_t start = shared_.clock_ns();
    job.computed_ns = start + uint64_t(start_ns_);
    for (size_t n_left = job.experts.size(); n_left > 0; n_left -= ready_.size()) {
        while (!find_ready(job)) {
            transfers_.step();
        }
        const auto took_ns = uint64_t(bytes_ns_ * double(ready_.size() * expert_bytes(job.il)));
        job.computed_ns = std::max(job.computed_ns, shared_.clock_ns()) + took_ns;
        n_computed_ += ready_.size();
        compute_ns_ += took_ns;
    }
    count_modelled_stall(lane, start);
}

void Missed::end_modelled(Lane & lane) {
    const uint64_t now = shared_.clock_ns();
    transfers_.advance(std::max(now, lane.missed->computed_ns) - now);
    count_modelled_stall(lane, now);
    forget(lane);
}

void Missed::count_modelled_stall(const Lane & lane, uint64_t since_ns) {
    const uint64_t waited_ns = shared_.clock_ns() - since_ns;
    stall_ns_ += waited_ns;
    count_stall(shared_, *lane.tier, waited_ns);
}

// The thread.

void Missed::run() {
    ask_for_short_slices();
    Lock lock(shared_.mutex);
    while (!stopping_) {
        if (queue_.empty()) {
            work_.wait(lock);
            continue;
        }
        MissedJob & job = *queue_.pop();
        computing_ = true;
        follow(start_ns_, (double)(now_ns() - job.queued_ns));
        try {
            compute(job, lock);
        } catch (const std::exception & e) { // memory, too
            if (!lock.owns_lock()) {
                lock.lock();
            }
            job.why = e.what();
        }
        release(job);
        job.done = true;
        computing_ = false;
        shared_.done.notify_all();
    }
}

// Experts that are there already first, together; the others as they come.
void Missed::compute(MissedJob & job, Lock & lock) {
    for (size_t n_left = job.experts.size(); n_left > 0; n_left -= ready_.size()) {
        while (!find_ready(job)) {
            if (!job.wanted || !job.why.empty() || shared_.cancelled || stopping_) {
                job.given_up = job.why.empty();
                return;
            }
            shared_.done.wait(lock);
        }
        lock.unlock();
        const uint64_t start = now_ns();
        slow_compute();
        compute_ready(job);
        const uint64_t took_ns = now_ns() - start;
        lock.lock();
        n_computed_ += job.measures ? 0 : ready_.size();
        compute_ns_ += job.measures ? 0 : took_ns;
        follow(bytes_ns_, (double)took_ns / (ready_.size() * expert_bytes(job.il)));
    }
}

// Those that have come since. Notes what will not come.
bool Missed::find_ready(MissedJob & job) {
    const Residency & below = tiers_.below->residency;
    ready_.clear();
    for (MissedJob::Expert & expert : job.experts) {
        if (!expert.computed && below.complete(expert.slot)) {
            expert.computed = true;
            ready_.push_back(&expert);
        } else if (!expert.computed && below.failed(expert.slot)) {
            job.failed_expert = expert.expert;
            job.why = shared_.error;
        }
    }
    return !ready_.empty() && job.why.empty();
}

void Missed::compute_ready(MissedJob & job) {
    const size_t n_nodes = job.chain->n_nodes() * ready_.size();
    size_t n_floats = 0;
    for (const MissedJob::Expert * expert : ready_) {
        n_floats += (job.chain->row_floats() + 2 * job.n_embd) * expert->n_choices; // with input and output
    }
    memory_.resize(std::max(memory_.size(), n_nodes * (ggml_tensor_overhead() + GGML_MEM_ALIGN) +
                                                ggml_graph_overhead_custom(n_nodes, false) + n_floats * sizeof(float)));
    ggml_context_ptr context(ggml_init({memory_.size(), memory_.data(), /*no_alloc =*/false}));
    if (!context) {
        throw Error(MOEGGUF_MEMORY, "no memory for a graph of experts");
    }
    ggml_context * ctx = context.get();
    ggml_cgraph * graph = ggml_new_graph_custom(ctx, n_nodes, false);
    std::vector<ggml_tensor *> products;
    for (const MissedJob::Expert * expert : ready_) {
        ggml_tensor * w[MOEGGUF_MAX_KINDS] = {};
        ggml_set_no_alloc(ctx, true);
        for (int kind = 0; kind < MOEGGUF_MAX_KINDS; kind++) {
            const int matrix = layout_.layers[job.il].matrix[kind];
            if (matrix >= 0) {
                const Matrix & m = layout_.matrices[matrix];
                w[kind] = ggml_new_tensor_2d(ctx, m.type, m.ne0, m.ne1);
                w[kind]->data = (void *)tiers_.below->pool()->data(matrix, expert->slot);
            }
        }
        ggml_set_no_alloc(ctx, false);
        ggml_tensor * x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, job.n_embd, expert->n_choices);
        float * row = (float *)x->data;
        for (int c = 0; c < expert->n_choices; c++, row += job.n_embd) {
            const int choice = job.choices[expert->first_choice + c];
            const float * input = job.inputs.data() + (size_t)(choice / job.n_expert_used) * job.n_embd;
            const float weight = job.weights.empty() ? 1.0f : job.weights[choice];
            std::transform(input, input + job.n_embd, row, [weight](float value) { return value * weight; });
        }
        products.push_back(build_chain(ctx, *job.chain, expert->expert, w, x));
        ggml_build_forward_expand(graph, products.back());
    }
    if (ggml_backend_graph_compute(backend_.get(), graph) != GGML_STATUS_SUCCESS) {
        throw Error(MOEGGUF_MEMORY, "the CPU could not compute experts");
    }
    for (size_t i = 0; i < ready_.size(); i++) {
        const float * row = (const float *)products[i]->data;
        for (int c = 0; c < ready_[i]->n_choices; c++, row += job.n_embd) {
            const int choice = job.choices[ready_[i]->first_choice + c];
            std::copy_n(row, job.n_embd, job.rows.data() + (size_t)choice * job.n_embd);
        }
    }
}

uint64_t Missed::expert_bytes(int il) const {
    uint64_t bytes = 0;
    for (int matrix : layout_.layers[il].matrix) {
        bytes += matrix >= 0 ? layout_.matrices[matrix].expert_bytes : 0;
    }
    return bytes;
}

} // namespace moegguf
