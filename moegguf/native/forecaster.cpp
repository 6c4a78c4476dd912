#include "forecaster.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <numeric>

namespace moegguf {
namespace {

constexpr int longest_window = 1 << 16;

void check(const moegguf_predictor & chosen) {
    if (chosen.window < 1 || chosen.window > longest_window || chosen.most_prefetches < 0 ||
        !(chosen.waste_weight >= 0.0f && std::isfinite(chosen.waste_weight))) {
        throw Error(MOEGGUF_INVALID, "a predictor looks at least one layer ahead, and its limits are 0 or more");
    }
}

} // namespace

void Forecaster::set(const moegguf_predictor * chosen) {
    std::lock_guard<std::mutex> one_at_a_time(control_);
    if (chosen) {
        check(*chosen);
        const PredictorType & type = predictor_type(chosen->name);
        const Arrays arrays(*chosen);
        std::unique_ptr<Predictor> predictor = type.make(layout_, arrays);
        stop();
        if (type_ != &type || !arrays_->same(arrays)) {
            calibration_ = Calibration();
        }
        type_ = &type;
        arrays_ = arrays;
        predictor_ = std::move(predictor);
        start(*chosen);
        wants_inputs_ = type.needs_inputs;
    } else {
        stop();
    }
}

void Forecaster::start(const moegguf_predictor & chosen) {
    options_ = chosen;
    best_.resize(layout_.n_expert_max);
    likely_.resize(layout_.n_expert_max);
    pass_ = 0;
    row_ = -1;
    {
        std::lock_guard<std::mutex> lock(rows_mutex_);
        rows_.resize(layout_.n_moe_layers);
        for (Row & row : rows_) {
            row.likely.resize(layout_.n_expert_max);
            row.chances.resize(layout_.n_expert_max);
        }
    }
    {
        std::lock_guard<std::mutex> lock(inbox_mutex_);
        head_ = size_ = 0;
        stopping_ = false;
    }
    thread_ = shared_.clock->start_thread("the predictor's thread", [this] { run(); });
    Lock lock(shared_.mutex);
    for (auto & tier : tiers_.compute) {
        tier->residency.count_uses(true);
    }
    lockstep_ = chosen.flags & MOEGGUF_PREDICT_LOCKSTEP;
    on_ = true;
}

void Forecaster::stop() {
    on_ = false;
    lockstep_ = false;
    wants_inputs_ = false;
    {
        std::lock_guard<std::mutex> lock(inbox_mutex_);
        stopping_ = true;
    }
    arrived_.notify_all();
    caught_up_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
    forget();
    Lock lock(shared_.mutex);
    transfers_.forget(Cause::forecast);
    for (auto & tier : tiers_.compute) {
        tier->residency.count_uses(false);
    }
    for (int il : layout_.moe_layers) {
        tiers_.of(il).residency.on_forecast(il, nullptr);
    }
}

void Forecaster::read(float * probabilities, uint8_t * known) const {
    std::lock_guard<std::mutex> lock(rows_mutex_);
    std::fill_n(probabilities, layout_.n_keys(), 0.0f);
    std::fill_n(known, layout_.layers.size(), uint8_t(0));
    for (size_t row = 0; row < rows_.size(); row++) {
        if (rows_[row].distance > 0) {
            const int il = layout_.moe_layers[row];
            known[il] = 1;
            std::copy_n(rows_[row].likely.begin(), layout_.layers[il].n_expert, probabilities + layout_.key(il, 0));
        }
    }
}

// What compute threads leave.

void Forecaster::announce(const PassTokens & of, uint64_t pass) {
    if (tiers_.any([](const Tier & tier) { return !tier.numbering.resident(); })) {
        post(of, -1, pass, [](Record &) {});
    }
}

void Forecaster::routing(int il, const PassTokens & of, const int32_t * expert_ids, int n_expert_used,
                         const float * inputs, int n_embd, uint64_t pass) {
    post(of, il, pass, [&](Record & record) {
        const int32_t * last = expert_ids + size_t(of.n_tokens - 1) * n_expert_used;
        record.n_expert_used = n_expert_used;
        record.ids.assign(last, last + n_expert_used);
        record.inputs.assign(inputs, inputs + (inputs ? n_embd : 0));
    });
}

template <typename Fill>
void Forecaster::post(const PassTokens & of, int il, uint64_t pass, Fill fill) {
    std::unique_lock<std::mutex> lock(inbox_mutex_);
    if (!on_) {
        return;
    }
    if (size_ == ring_.size()) {
        head_ = (head_ + 1) % ring_.size();
        size_ -= 1;
    }
    Record & record = ring_[(head_ + size_) % ring_.size()];
    record.pass = pass;
    record.il = il;
    record.of = of;
    try {
        fill(record);
    } catch (const std::bad_alloc &) {
        return; // no reason for the pass to end
    }
    if (!thread_.joinable()) { // virtual time
        follow(record, true);
        return;
    }
    size_ += 1;
    lock.unlock();
    arrived_.notify_one();
}

void Forecaster::keep_step() {
    if (lockstep_) {
        std::unique_lock<std::mutex> lock(inbox_mutex_);
        caught_up_.wait(lock, [this] { return stopping_ || (size_ == 0 && !busy_); });
    }
}

// The thread that predicts.

void Forecaster::run() {
    std::unique_lock<std::mutex> lock(inbox_mutex_);
    while (true) {
        arrived_.wait(lock, [this] { return stopping_ || size_ > 0; });
        if (stopping_) {
            return;
        }
        std::swap(current_, ring_[head_]);
        head_ = (head_ + 1) % ring_.size();
        size_ -= 1;
        busy_ = true;
        const bool newest = size_ == 0;
        lock.unlock();
        try {
            follow(current_, newest);
        } catch (const std::bad_alloc &) {
            // What memory does not suffice for is not predicted.
        }
        lock.lock();
        busy_ = false;
        if (size_ == 0) {
            caught_up_.notify_all();
        }
    }
}

// What is not the newest is learned from, and predicts nothing: what comes after it knows more.
void Forecaster::follow(const Record & record, bool newest) {
    const uint64_t start = now_ns();
    const bool routed = record.il >= 0;
    if (!routed || record.pass != pass_ || layout_.row_of[record.il] <= row_) {
        begin_pass(record);
    }
    if (routed) {
        if (!record.of.several) {
            compare(record);
            const float * input = record.inputs.empty() ? nullptr : record.inputs.data();
            predictor_->on_routing({record.il, record.of.n_tokens, record.ids.data(), record.n_expert_used, input,
                                    (int)record.inputs.size()});
        }
        row_ = layout_.row_of[record.il];
    }
    const bool decodes = record.of.n_tokens == 1 && !record.of.several && (routed || record.of.token >= 0);
    if (newest && decodes) {
        predict();
        act();
    }
    count(shared_.counters.forecast_ns, now_ns() - start);
}

void Forecaster::begin_pass(const Record & record) {
    pass_ = record.pass;
    row_ = -1;
    n_started_ = get(shared_.counters.prefetch_started);
    predictor_->on_token(record.of.token);
    forget();
}

void Forecaster::forget() {
    std::lock_guard<std::mutex> lock(rows_mutex_);
    for (Row & row : rows_) {
        row.distance = 0;
    }
}

// What was predicted of a layer against what it showed.
void Forecaster::compare(const Record & record) {
    Row & row = rows_[layout_.row_of[record.il]];
    if (row.distance == 0) {
        return;
    }
    const int n_expert = layout_.layers[record.il].n_expert;
    const auto used = [&](int expert) {
        return std::find(record.ids.begin(), record.ids.end(), expert) != record.ids.end();
    };
    for (int e = 0; e < n_expert; e++) {
        calibration_.count(row.distance, row.likely[e], used(e));
    }
    const int n_best = rank(row.likely.data(), record.il, record.n_expert_used);
    count(shared_.counters.forecast_picks, n_best);
    count(shared_.counters.forecast_right, std::count_if(best_.begin(), best_.begin() + n_best, used));
    std::lock_guard<std::mutex> lock(rows_mutex_);
    row.distance = 0;
}

// best_ begins with the layer's `most` most probable experts; how many these are.
int Forecaster::rank(const float * likely, int il, int most) {
    const int n_expert = layout_.layers[il].n_expert, n_best = std::min(most, n_expert);
    std::iota(best_.begin(), best_.begin() + n_expert, 0);
    std::partial_sort(best_.begin(), best_.begin() + n_best, best_.begin() + n_expert,
                      [&](int a, int b) { return likely[a] != likely[b] ? likely[a] > likely[b] : a < b; });
    return n_best;
}

// The layers of the window, or those of them that nothing is known about yet.
void Forecaster::predict() {
    const int last = std::min(row_ + options_.window, layout_.n_moe_layers - 1);
    for (int at = row_ + 1; at <= last; at++) {
        Row & row = rows_[at];
        if (row.distance > 0 && (options_.flags & MOEGGUF_PREDICT_ONCE)) {
            continue;
        }
        const int il = layout_.moe_layers[at], distance = at - row_;
        if (predictor_->predict(il, distance, likely_.data())) {
            std::lock_guard<std::mutex> lock(rows_mutex_);
            row.distance = distance;
            row.told = false;
            row.likely = likely_;
            std::transform(likely_.begin(), likely_.begin() + layout_.layers[il].n_expert, row.chances.begin(),
                           [&](float p) { return calibration_.of(distance, p); });
        }
    }
}

void Forecaster::act() {
    Lock lock(shared_.mutex);
    wants_.clear();
    for (int at = row_ + 1; at < layout_.n_moe_layers; at++) {
        Row & row = rows_[at];
        const uint64_t deadline = step_of(at);
        if (row.distance == 0 || deadline <= transfers_.step()) {
            continue; // unknown, or its time has passed meanwhile
        }
        if (!row.told) {
            const int il = layout_.moe_layers[at];
            tiers_.of(il).residency.on_forecast(il, row.chances.data());
            row.told = true;
        }
        if (prefetching_) {
            want_row(at, deadline);
        }
    }
    const uint64_t n_started = get(shared_.counters.prefetch_started) - n_started_, most = options_.most_prefetches;
    const size_t n_left = most > n_started ? most - n_started : 0;
    wants_.resize(std::min(wants_.size(), n_left));
    transfers_.forget(Cause::forecast); // this is what is known now
    for (const Want & want : wants_) {
        transfers_.want(want);
    }
    transfers_.wake_idle_reader();
}

// Of a layer's most probable experts, as many as a token uses, those that are not there and worth it.
// An expert that is used with chance p saves its stall, or as much of it as there is time until its layer comes; one
// that is not keeps the link from others for nothing. What is left is what the expert evicted for it may be worth.
void Forecaster::want_row(int at, uint64_t deadline) {
    const Row & row = rows_[at];
    const int il = layout_.moe_layers[at];
    const float saved = transfers_.share_in_time(at - row_);
    const int n_best = rank(row.likely.data(), il, layout_.layers[il].n_expert_used);
    for (int i = 0; i < n_best; i++) {
        const int e = best_[i];
        const float p = row.chances[e];
        const float worth = options_.waste_weight > 0.0f ? p * saved - (1.0f - p) * options_.waste_weight : INFINITY;
        if (row.likely[e] > 0.0f && worth > 0.0f && tiers_.of(il).residency.find(il, e) < 0) {
            wants_.push_back({il, e, Cause::forecast, worth, deadline});
        }
    }
}

} // namespace moegguf
