#include "cpu_misses/cpu_misses.h"

#include "fault.h"
#include "nodes.h"
#include "short_slices.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

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

CpuMisses::~CpuMisses() {
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

void CpuMisses::check_tiers(bool possible) const {
    const auto has_ram = [](const Tier & tier) { return tier.ram() != nullptr; };
    if (!possible || !tiers_.any(has_ram)) {
        throw Error(MOEGGUF_INVALID,
                    "misses can be computed where a device has slots over slots in RAM, by a thread"
                    " at least");
    }
}

void CpuMisses::set_on() {
    admission_.start();
    transfers_.set_admission([this](int il, int expert) { return admission_.admits(il, expert); });
    on_ = true;
}

void CpuMisses::start(int n_threads) {
    check_tiers(n_threads > 0 && tiers_.compute[0]->pool());
    Lock lock(shared_.mutex);
    if (on_) {
        return;
    }
    backend_ = make_backend(find_device(nullptr), n_threads);
    thread_ = start_thread("the thread that computes misses", [this] { run(); });
    set_on();
}

void CpuMisses::start_modelled(double bytes_per_ns, double layer_ns) {
    check_tiers(bytes_per_ns > 0 && layer_ns >= 0 && !tiers_.compute[0]->pool());
    Lock lock(shared_.mutex);
    bytes_ns_ = 1 / bytes_per_ns;
    start_ns_ = layer_ns;
    modelled_ = true;
    set_on();
}

bool CpuMisses::serves(int il, int n_tokens) const {
    return on_ && n_tokens <= most_tokens && tiers_.of(il).ram();
}

// Graphs are built again and again, with few chains.
const ExpertChain * CpuMisses::keep(ExpertChain chain) {
    std::lock_guard<std::mutex> lock(chains_mutex_);
    const auto known = std::find_if(chains_.begin(), chains_.end(), [&](const auto & one) { return *one == chain; });
    if (known != chains_.end()) {
        return known->get();
    }
    chain.read_rows();
    return chains_.emplace_back(std::make_unique<const ExpertChain>(std::move(chain))).get();
}

void CpuMisses::read_graph(const ggml_cgraph & graph) {
    if (!on_) {
        return;
    }
    int n_layers = 0;
    std::string note;
    const auto serves = [this](int il, int n_tokens) { return this->serves(il, n_tokens); };
    read_chains(graph, layout_, serves, [&](ggml_tensor * ids, ExpertChain chain, const std::string & why) {
        if (!why.empty() && note.empty()) {
            note = "layer " + std::to_string(chain.il) + " " + why;
        }
        n_layers += why.empty();
        set_chain(ids, why.empty() ? keep(std::move(chain)) : nullptr);
    });
    if (n_layers > 0 || !note.empty()) {
        Lock lock(shared_.mutex);
        n_layers_ = n_layers;
        note_ = note;
    }
}

void CpuMisses::info(moegguf_computed & out) {
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

CpuMisses::Kept & CpuMisses::kept(Context & context) {
    if (!context.kept) {
        context.kept = std::make_shared<Kept>();
    }
    return *static_cast<Kept *>(context.kept.get());
}

MissJob * CpuMisses::job_of(const Context & context) {
    return context.kept ? static_cast<const Kept *>(context.kept.get())->job : nullptr;
}

// The router's choice.

void CpuMisses::observe(Context & context, Lock &) {
    if (on_) {
        admission_.note_uses(context.event.il, context.event.experts, get(shared_.counters.tokens));
    }
}

bool CpuMisses::pin_absent(Context & context, Lock & lock) {
    choose(context);
    if (!SlotSupply::pin_absent(context, lock)) {
        return false;
    }
    if (!find_dummies(context)) {
        fail_without_slot(context, context.event.experts[0]);
        return false;
    }
    return true;
}

// Marks experts that the CPU computes as those that need no slot.
void CpuMisses::choose(Context & context) {
    Event & event = context.event;
    const Tier & tier = *context.pinned.tier;
    const ExpertChain * chain = event.node ? chain_of(event.node) : nullptr;
    if (!serves(event.il, event.n_tokens) || !(chain || modelled_) || tier.numbering.resident()) {
        return;
    }
    missing_.clear();
    std::copy_if(event.experts.begin(), event.experts.end(), std::back_inserter(missing_),
                 [&](int expert) { return event.slot_of[expert] == Event::no_slot_yet; });
    const bool takes_none = tier.residency.has_free(); // of another expert
    const auto admitted = [&](int expert) { return takes_none || admission_.admits(event.il, expert); };
    const auto first_to_share = std::stable_partition(missing_.begin(), missing_.end(),
                                                      [&](int expert) { return comes_as_fast(event.il, expert); });
    std::stable_partition(first_to_share, missing_.end(), admitted);
    const int n_missed = (int)missing_.size();
    const int n_copies = count_fastest(event.il, int(first_to_share - missing_.begin()), n_missed);
    if (n_copies == n_missed) {
        measure(context, chain);
        return;
    }
    for (int i = 0; i < n_copies; i++) { // what they are copied from makes no room for those that follow
        if (const int r = tier.ram()->residency.find(event.il, missing_[i]); r >= 0) {
            tier.ram()->residency.touch(r);
        }
    }
    MissJob & job = new_job(context, chain);
    LookUps in_ram(*tiers_.ram);
    for (int i = n_missed - 1; i >= n_copies; i--) { // first uses first
        const int expert = missing_[i];
        if (!take(job, event, expert, in_ram)) {
            continue;
        }
        event.slot_of[expert] = Event::needs_no_slot;
        if (admitted(expert)) { // a slot when the link is free
            transfers_.want({event.il, expert});
        }
    }
    transfers_.wake_readers();
    if (job.experts.empty()) {
        forget(context);
    }
}

// Whether an expert is there no later by a copy, where it is still to be read: that goes on matrix by matrix meanwhile,
// and the processor begins when all have come.
bool CpuMisses::comes_as_fast(int il, int expert) const {
    const Residency & in_ram = tiers_.ram->residency;
    const int r = in_ram.find(il, expert);
    const double last_ns = tiers_.of(il).copies->bytes_ns() / __builtin_popcount(layout_.layers[il].chunks);
    return (r < 0 || !in_ram.complete(r)) && bytes_ns_ >= last_ns;
}

// Of a layer's misses, so many copies, `least` or more, that link and processor end as soon as they can side by side.
int CpuMisses::count_fastest(int il, int least, int n_missed) const {
    const double expert_ns = (double)layout_.bytes(il, all_kinds),
                 copy_ns = expert_ns * tiers_.of(il).copies->bytes_ns();
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
void CpuMisses::measure(Context & context, const ExpertChain * chain) {
    constexpr int events_between = 32;
    n_copied_ += !missing_.empty();
    Residency & in_ram = tiers_.ram->residency;
    const int r = missing_.empty() ? -1 : in_ram.find(context.event.il, missing_.back());
    if (n_copied_ < events_between || modelled_ || r < 0 || !in_ram.complete(r)) {
        return;
    }
    n_copied_ = 0;
    MissJob & job = new_job(context, chain);
    job.measures = true;
    in_ram.pin(r);
    job.choices.push_back(0); // any input takes as long
    job.experts.push_back({missing_.back(), r, 0, 1, false});
}

MissJob & CpuMisses::new_job(Context & context, const ExpertChain * chain) {
    const auto free = std::find_if(jobs_.begin(), jobs_.end(),
                                   [](const auto & job) { return !job->wanted && (!job->begun || job->done); });
    MissJob & job = free == jobs_.end() ? *jobs_.emplace_back(std::make_unique<MissJob>()) : **free;
    job.il = context.event.il;
    job.n_expert_used = context.event.n_expert_used;
    job.chain = chain;
    job.experts.clear();
    job.choices.clear();
    job.wanted = true;
    job.begun = job.done = job.given_up = job.measures = false;
    job.failed_expert = -1;
    job.why.clear();
    kept(context).job = &job;
    return job;
}

// False where no slot in RAM can be had for it.
bool CpuMisses::take(MissJob & job, const Event & event, int expert, LookUps & in_ram) {
    Tier & ram = *tiers_.ram;
    int r = in_ram.find(event.il, expert);
    if (r < 0) {
        r = ram.take_slot(event.il, expert, event.step);
    }
    if (r < 0) {
        return false;
    }
    ram.residency.request(r);
    ram.residency.forgive(r); // for passes that have ended
    ram.residency.pin(r);
    transfers_.demand_in_ram(r);
    const int first = (int)job.choices.size();
    for (int i = 0; i < (int)event.n_ids(); i++) {
        if (event.ids[i] == expert) {
            job.choices.push_back(i);
        }
    }
    job.experts.push_back({expert, r, first, (int)job.choices.size() - first, false});
    return true;
}

// Any slots that no expert of the event is in, as many as a token may need. False where there are too few.
bool CpuMisses::find_dummies(Context & context) {
    const MissJob * job = job_of(context);
    if (!job || job->measures) {
        return true;
    }
    std::vector<int> & found = kept(context).dummy_slots;
    found.clear();
    const Residency & residency = context.pinned.tier->residency;
    const size_t n_wanted = std::min<size_t>(job->experts.size(), job->n_expert_used);
    const auto among = [](const std::vector<int> & slots, int s) {
        return std::find(slots.begin(), slots.end(), s) != slots.end();
    };
    for (const bool quiet : {true, false}) { // rather those that nothing is written into
        for (int s = 0; s < residency.n_usable() && found.size() < n_wanted; s++) {
            const bool is_quiet = residency.slot(s).reading == 0;
            if (is_quiet == quiet && !among(context.pinned.slots, s) && !among(found, s)) {
                found.push_back(s);
            }
        }
    }
    return found.size() == n_wanted;
}

void CpuMisses::release(Context & context, int next_il) {
    if (job_of(context) && next_il > context.pass.il) {
        context.fail(MOEGGUF_INVALID, context.pass.il, -1,
                     "experts that the CPU has computed did not reach the layer's output");
    }
    forget(context);
    SlotSupply::release(context, next_il);
}

// What was chosen at the event before.
void CpuMisses::forget(Context & context) {
    MissJob * job = job_of(context);
    if (!job) {
        return;
    }
    kept(context).job = nullptr;
    job->wanted = false;
    if (!job->begun) {
        release(*job);
    }
}

void CpuMisses::release(MissJob & job) {
    for (const MissJob::Expert & expert : job.experts) {
        tiers_.ram->unpin(expert.slot);
    }
}

void CpuMisses::wait(Context & context, uint8_t kinds) {
    if (modelled_ && job_of(context)) {
        begin_modelled(context);
    }
    SlotSupply::wait(context, kinds);
}

void CpuMisses::finish(Context & context) {
    write_slot_ids(context);
    if (!job_of(context)) {
        return;
    }
    modelled_ ? end_modelled(context) : begin(context);
}

void CpuMisses::write_slot_ids(Context & context) {
    const MissJob * job = job_of(context);
    if (!job || job->measures) {
        SlotSupply::finish(context);
        return;
    }
    Event & event = context.event;
    const std::vector<int> & dummies = kept(context).dummy_slots;
    const int first_slot = context.pinned.tier->numbering.window(event.il).first_slot;
    int n_dummies = 0;
    for (size_t i = 0; i < event.n_ids(); i++) {
        n_dummies = i % event.n_expert_used == 0 ? 0 : n_dummies; // a token's are distinct
        const int s = event.slot_of[event.ids[i]];
        event.ids[i] = (s == Event::needs_no_slot ? dummies[n_dummies++] : s) - first_slot;
    }
}

// The CPU begins with the experts that it computes, beside the device.
void CpuMisses::begin(Context & context) {
    MissJob & job = *job_of(context);
    const ggml_tensor & node = *context.event.node;
    const int n_tokens = (int)node.ne[1], n_embd = (int)node.src[2]->ne[0];
    const size_t n_choices = (size_t)n_tokens * job.n_expert_used;
    const float * inputs = floats(node.src[2], (size_t)n_embd * n_tokens, context.inputs);
    const float * weights = job.chain->weights_input ? floats(node.src[1], n_choices, context.weights) : nullptr;
    const bool known = inputs && (weights || !job.chain->weights_input);
    if (!known && !job.measures) {
        context.fail(MOEGGUF_INVALID, job.il, -1, "the layer's input cannot be read for the CPU");
        return;
    }
    if (!known) {
        Lock lock(shared_.mutex);
        forget(context);
        return;
    }
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
        forget(context);
    }
}

// The multiplication.

bool CpuMisses::changes(const Context & context, const ggml_tensor * node) const {
    const MissJob * job = job_of(context);
    return job && multiplies_down(node, job->il);
}

// Something that is to be computed is still in the file.
bool CpuMisses::awaits_file(const MissJob & job) const {
    const Residency & in_ram = tiers_.ram->residency;
    return std::any_of(job.experts.begin(), job.experts.end(), [&](const MissJob::Expert & expert) {
        return !expert.computed && !in_ram.complete(expert.slot);
    });
}

// A stall of the layer's device, and of the file's link as long as anything comes from there.
void CpuMisses::await_rows(Context & context, const MissJob & job, Lock & lock) {
    const uint64_t start = now_ns();
    uint64_t file_done = start;
    bool from_file = false;
    const auto done = [&] {
        file_done = from_file ? now_ns() : file_done;
        from_file = awaits_file(job);
        return job.done || context.failed();
    };
    stall(shared_, *context.pinned.tier, lock, done, Clock::Deadline::max(), &stall_ns_);
    count(tiers_.ram->counters.stall_ns, file_done - start);
}

void CpuMisses::change(Context & context, ggml_tensor * t) {
    MissJob & job = *job_of(context);
    if (shared_.forked()) {
        return;
    }
    Lock lock(shared_.mutex);
    await_rows(context, job, lock);
    if (!job.done || job.given_up) {
        context.fail(MOEGGUF_CANCELLED, job.il, -1, "cancelled");
    } else if (!job.why.empty()) {
        context.fail(MOEGGUF_IO, job.il, job.failed_expert, job.why);
    }
    lock.unlock();
    const uint64_t start = now_ns();
    const auto chosen = [&](int i) {
        return std::find(job.choices.begin(), job.choices.end(), i) != job.choices.end();
    };
    const int n_choices = (int)(t->ne[1] * t->ne[2]);
    for (int i = 0; i < n_choices && !context.failed();) { // neighbours in one copy
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
    forget(context);
}

// Virtual time.

void CpuMisses::begin_modelled(Context & context) {
    Lock lock(shared_.mutex);
    MissJob & job = *job_of(context);
    const uint64_t start = shared_.clock->now_ns();
    job.computed_ns = start + uint64_t(start_ns_);
    for (size_t n_left = job.experts.size(); n_left > 0; n_left -= ready_.size()) {
        if (!stall(shared_, *context.pinned.tier, lock, [&] { return find_ready(job); })) {
            return;
        }
        const auto took_ns = uint64_t(bytes_ns_ * double(ready_.size() * layout_.bytes(job.il, all_kinds)));
        job.computed_ns = std::max(job.computed_ns, shared_.clock->now_ns()) + took_ns;
        n_computed_ += ready_.size();
        compute_ns_ += took_ns;
    }
    stall_ns_ += shared_.clock->now_ns() - start;
}

// What the link copies meanwhile is there.
void CpuMisses::end_modelled(Context & context) {
    Lock lock(shared_.mutex);
    const uint64_t now = shared_.clock->now_ns();
    shared_.clock->advance(std::max(now, job_of(context)->computed_ns) - now);
    stall_ns_ += shared_.clock->now_ns() - now;
    count_stall(shared_, *context.pinned.tier, shared_.clock->now_ns() - now);
    forget(context);
}

// The thread.

void CpuMisses::run() {
    Lock lock(shared_.mutex);
    while (!stopping_) {
        if (queue_.empty()) {
            work_.wait(lock);
            continue;
        }
        MissJob & job = *queue_.pop();
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
void CpuMisses::compute(MissJob & job, Lock & lock) {
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
        if (fault(MOEGGUF_FAULT_SLOW_COMPUTE)) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        compute_ready(job);
        const uint64_t took_ns = now_ns() - start;
        lock.lock();
        n_computed_ += job.measures ? 0 : ready_.size();
        compute_ns_ += job.measures ? 0 : took_ns;
        follow(bytes_ns_, (double)took_ns / (ready_.size() * layout_.bytes(job.il, all_kinds)));
    }
}

// Those that have come since. Notes what will not come.
bool CpuMisses::find_ready(MissJob & job) {
    const Residency & in_ram = tiers_.ram->residency;
    ready_.clear();
    for (MissJob::Expert & expert : job.experts) {
        if (!expert.computed && in_ram.complete(expert.slot)) {
            expert.computed = true;
            ready_.push_back(&expert);
        } else if (!expert.computed && in_ram.failed(expert.slot)) {
            job.failed_expert = expert.expert;
            job.why = shared_.error;
        }
    }
    return !ready_.empty() && job.why.empty();
}

void CpuMisses::compute_ready(MissJob & job) {
    const size_t n_nodes = job.chain->n_nodes() * ready_.size();
    size_t n_floats = 0;
    for (const MissJob::Expert * expert : ready_) {
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
    for (const MissJob::Expert * expert : ready_) {
        ggml_tensor * w[MOEGGUF_MAX_KINDS] = {};
        ggml_set_no_alloc(ctx, true);
        for (int kind = 0; kind < MOEGGUF_MAX_KINDS; kind++) {
            const int matrix = layout_.layers[job.il].matrix[kind];
            if (matrix >= 0) {
                const Matrix & m = layout_.matrices[matrix];
                w[kind] = ggml_new_tensor_2d(ctx, m.type, m.ne0, m.ne1);
                w[kind]->data = (void *)tiers_.ram->pool()->data(matrix, expert->slot);
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

} // namespace moegguf
