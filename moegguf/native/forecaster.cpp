#include "forecaster.h"

#include "short_slices.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <numeric>
#include <system_error>

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
        std::unique_ptr<Predictor> next = type.make(layout_, Arrays(*chosen));
        stop();
        predictor_ = std::move(next);
        start(*chosen);
        wants_inputs_ = type.needs_inputs;
    } else {
        stop();
    }
}

void Forecaster::start(const moegguf_predictor & chosen) {
    options_ = chosen;
    calibration_ = Calibration();
    best_.resize(layout_.n_expert_max);
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
        for (Record & record : ring_) {
            record.ids.reserve(layout_.n_expert_max);
        }
        head_ = size_ = 0;
        stopping_ = false;
    }
    if (!shared_.simulated()) {
        try {
            thread_ = std::thread([this] { run(); });
        } catch (const std::system_error & e) {
            throw Error(MOEGGUF_MEMORY, std::string("cannot start the predictor's thread: ") + e.what());
        }
    }
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
    settled_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
    forget();
    Lock lock(shared_.mutex);
    transfers_.set_wishes({});
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

void Forecaster::token(int token, uint64_t pass) {
    if (tiers_.any([](const Tier & tier) { return !tier.numbering.resident(); })) {
        post({}, token, pass);
    }
}

void Forecaster::routing(const Observation & seen, uint64_t pass) {
    post(seen, -1, pass);
}

void Forecaster::post(const Observation & seen, int token, uint64_t pass) {
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
    record.token = token;
    record.seen = seen;
    try {
        record.ids.assign(seen.expert_ids, seen.expert_ids + seen.n_expert_used);
        record.input.assign(seen.input, seen.input + (seen.input ? seen.n_embd : 0));
    } catch (const std::bad_alloc &) {
        return; // no reason for the pass to end
    }
    if (shared_.simulated()) {
        follow(record, true);
        return;
    }
    size_ += 1;
    lock.unlock();
    arrived_.notify_one();
}

void Forecaster::settle() {
    if (lockstep_) {
        std::unique_lock<std::mutex> lock(inbox_mutex_);
        settled_.wait(lock, [this] { return stopping_ || (size_ == 0 && !busy_); });
    }
}

// The thread that predicts.

void Forecaster::run() {
    ask_for_short_slices();
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
            settled_.notify_all();
        }
    }
}

// What is not the newest is learned from, and predicts nothing: what comes after it knows more.
void Forecaster::follow(const Record & record, bool newest) {
    const uint64_t start = now_ns();
    Observation seen = record.seen;
    seen.expert_ids = record.ids.data();
    seen.input = record.input.empty() ? nullptr : record.input.data();
    const bool routed = seen.il >= 0;
    if (!routed || record.pass != pass_ || layout_.row_of[seen.il] <= row_) {
        begin_pass(record);
    }
    if (routed) {
        compare(seen);
        predictor_->on_routing(seen);
        row_ = layout_.row_of[seen.il];
        single_ = seen.n_tokens == 1;
    }
    if (newest && single_) {
        predict();
        act();
    }
    count(shared_.counters.forecast_ns, now_ns() - start);
}

void Forecaster::begin_pass(const Record & record) {
    pass_ = record.pass;
    row_ = -1;
    single_ = record.token >= 0;
    n_started_ = get(shared_.counters.prefetch_started);
    predictor_->on_token(record.token);
    forget();
}

void Forecaster::forget() {
    std::lock_guard<std::mutex> lock(rows_mutex_);
    for (Row & row : rows_) {
        row.distance = 0;
    }
}

// What was predicted of a layer against what it showed.
void Forecaster::compare(const Observation & seen) {
    Row & row = rows_[layout_.row_of[seen.il]];
    if (row.distance == 0 || seen.n_tokens != 1) {
        return;
    }
    const int n_expert = layout_.layers[seen.il].n_expert;
    const auto used = [&](int expert) {
        return std::find(seen.expert_ids, seen.expert_ids + seen.n_expert_used, expert) !=
               seen.expert_ids + seen.n_expert_used;
    };
    for (int e = 0; e < n_expert; e++) {
        calibration_.count(row.distance, row.likely[e], used(e));
    }
    const int n_best = rank(row, seen.il, seen.n_expert_used);
    count(shared_.counters.forecast_picks, n_best);
    count(shared_.counters.forecast_right, std::count_if(best_.begin(), best_.begin() + n_best, used));
    std::lock_guard<std::mutex> lock(rows_mutex_);
    row.distance = 0;
}

// best_ begins with the layer's `most` most probable experts; how many these are.
int Forecaster::rank(const Row & row, int il, int most) {
    const int n_expert = layout_.layers[il].n_expert, n_best = std::min(most, n_expert);
    std::iota(best_.begin(), best_.begin() + n_expert, 0);
    std::partial_sort(best_.begin(), best_.begin() + n_best, best_.begin() + n_expert, [&](int a, int b) {
        return row.likely[a] != row.likely[b] ? row.likely[a] > row.likely[b] : a < b;
    });
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
        std::lock_guard<std::mutex> lock(rows_mutex_);
        if (!predictor_->predict(il, distance, row.likely.data())) {
            continue;
        }
        row.distance = distance;
        row.told = false;
        for (int e = 0; e < layout_.layers[il].n_expert; e++) {
            row.chances[e] = calibration_.of(distance, row.likely[e]);
        }
    }
}

void Forecaster::act() {
    Lock lock(shared_.mutex);
    wishes_.clear();
    for (int at = row_ + 1; at < layout_.n_moe_layers; at++) {
        Row & row = rows_[at];
        const uint64_t turn = turn_of(at);
        if (row.distance == 0 || turn <= transfers_.turn()) {
            continue; // unknown, or its time has passed meanwhile
        }
        if (!row.told) {
            const int il = layout_.moe_layers[at];
            tiers_.of(il).residency.on_forecast(il, row.chances.data());
            row.told = true;
        }
        if (prefetching_) {
            wish_for_row(at, turn);
        }
    }
    const uint64_t n_started = get(shared_.counters.prefetch_started) - n_started_, most = options_.most_prefetches;
    const size_t n_left = most > n_started ? most - n_started : 0;
    wishes_.resize(std::min(wishes_.size(), n_left));
    transfers_.set_wishes(wishes_);
}

// Of a layer's most probable experts, as many as a token uses, those that are not there and worth it.
// An expert that is used with chance p saves its stall, or as much of it as there is time until its layer's turn; one
// that is not keeps the link from others for nothing. What is left is what the expert evicted for it may be worth.
void Forecaster::wish_for_row(int at, uint64_t turn) {
    const Row & row = rows_[at];
    const int il = layout_.moe_layers[at];
    const float saved = transfers_.share_in_time(at - row_);
    const int n_best = rank(row, il, layout_.layers[il].n_expert_used);
    for (int i = 0; i < n_best; i++) {
        const int e = best_[i];
        const float p = row.chances[e];
        const float worth = options_.waste_weight > 0.0f ? p * saved - (1.0f - p) * options_.waste_weight : INFINITY;
        if (row.likely[e] > 0.0f && worth > 0.0f && tiers_.of(il).residency.find(il, e) < 0) {
            wishes_.push_back({turn, il, e, worth});
        }
    }
}

} // namespace moegguf
