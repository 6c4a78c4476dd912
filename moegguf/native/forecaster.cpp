// forecaster.cpp: implements forecaster.h: the ring of records, the predictor thread, and its prefetches.
#include "forecaster.h"

#include "router_scores.h"
#include "switches.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <numeric>

namespace moegguf {
namespace {

constexpr int longest_window = 1 << 16;

} // namespace

void Forecaster::set(const moegguf_predictor * chosen) {
    std::lock_guard<std::mutex> one_at_a_time(control_);
    if (!chosen) {
        keep_step();
        stop();
        return;
    }
    if (chosen->window < 1 || chosen->window > longest_window || chosen->most_prefetches < 0 ||
        !(chosen->waste_weight >= 0.0f && std::isfinite(chosen->waste_weight))) {
        throw Error(
            MOEGGUF_INVALID,
            "a predictor must look at least one layer ahead and at most 65536, and its limits must be 0 or more");
    }
    const PredictorFactory factory{&predictor_type(chosen->name), Arrays(*chosen)};
    std::unique_ptr<Predictor> first = factory.type->make(layout_, factory.arrays);
    keep_step();
    stop();
    if (!factory_ || factory_->type != factory.type) { calibration_ = Calibration(); }
    factory_ = factory;
    predictors_.clear();
    predictors_.push_back({-1, 0, std::move(first)});
    options_ = *chosen;
    best_.resize(layout_.n_expert_max);
    each_.resize(size_t(most_selected) * layout_.n_expert_max);
    selected_.clear();
    pass_ = 0;
    row_ = -1;
    n_sequences_ = 0;
    {
        std::lock_guard<std::mutex> lock(layers_mutex_);
        layers_.resize(layout_.n_moe_layers);
        for (LayerForecast & row : layers_) {
            row.likely.resize(layout_.n_expert_max);
            row.chances.resize(layout_.n_expert_max);
        }
    }
    {
        std::lock_guard<std::mutex> lock(inbox_mutex_);
        head_ = size_ = 0;
        stopping_ = false;
    }
    if (!shared_.has(MOEGGUF_SIMULATE)) {
        thread_ = start_thread("the predictor's thread", [this] { run(); });
    }
    Lock lock(shared_.mutex);
    for (auto & tier : tiers_.compute) { tier->residency.count_uses(true); }
    lockstep_ = chosen->flags & MOEGGUF_PREDICT_LOCKSTEP;
    on_ = true;
    wants_inputs_ = factory.type->needs_inputs;
    const bool scores = is_on(Remedy::graph_scores) && factory.type->takes_scores;
    scored_layers_ = scores && options_.window <= most_scored_layers ? options_.window : 0;
}

void Forecaster::stop() {
    on_ = false;
    lockstep_ = false;
    wants_inputs_ = false;
    scored_layers_ = 0;
    {
        std::lock_guard<std::mutex> lock(inbox_mutex_);
        stopping_ = true;
    }
    arrived_.notify_all();
    caught_up_.notify_all();
    if (thread_.joinable()) { thread_.join(); }
    forget();
    Lock lock(shared_.mutex);
    transfers_.forget(Cause::forecast);
    for (auto & tier : tiers_.compute) { tier->residency.count_uses(false); }
    for (int il : layout_.moe_layers) { tiers_.of(il).residency.on_forecast(il, nullptr); }
}

void Forecaster::read(float * probabilities, uint8_t * known) const {
    std::lock_guard<std::mutex> lock(layers_mutex_);
    std::fill_n(probabilities, layout_.n_keys(), 0.0f);
    std::fill_n(known, layout_.layers.size(), uint8_t(0));
    for (size_t row = 0; row < layers_.size(); row++) {
        if (layers_[row].distance > 0) {
            const int il = layout_.moe_layers[row];
            known[il] = 1;
            std::copy_n(layers_[row].likely.begin(), layout_.layers[il].n_expert, probabilities + layout_.key(il, 0));
        }
    }
}

// Compute threads call the functions of this section.

void Forecaster::announce(const moegguf_tokens_event & of, uint64_t pass) {
    if (tiers_.any([](const Tier & tier) { return !tier.numbering.resident(); })) {
        post(of, -1, pass, [](Record &) {});
    }
}

void Forecaster::routing(const Choice & choice, const moegguf_tokens_event & of, uint64_t pass) {
    post(of, choice.il, pass, [&](Record & record) {
        const auto append = [](auto & to, const auto * from, int index, int n) {
            to.insert(to.end(), from + size_t(index) * n, from + size_t(index + 1) * n);
        };
        record.n_expert_used = choice.n_expert_used;
        record.n_embd = choice.n_embd;
        record.n_scored = choice.scores ? choice.n_scored : 0;
        const float * inputs = wants_inputs(choice.n_tokens) ? choice.inputs : nullptr;
        const int row = layout_.row_of[choice.il];
        for (const LastToken & last : record.last) {
            append(record.ids, choice.ids, last.index, choice.n_expert_used);
            if (inputs) { append(record.inputs, inputs, last.index, choice.n_embd); }
            const float * scores = choice.scores;
            for (int at = row + 1; at <= row + record.n_scored; at++) {
                const int n_expert = layout_.layers[layout_.moe_layers[at]].n_expert;
                append(record.scores, scores, last.index, n_expert);
                scores += size_t(choice.n_tokens) * n_expert;
            }
        }
        if (record.n_scored > 0) { count(shared_.counters.forecast_scored); }
    });
}

// Writes the last token of each sequence of a pass to record.last. Keeps at most most_selected sequences, evenly
// spaced. If the pass has token ids, also writes the last ids of each kept sequence, up to most_known, to
// record.tokens.
void Forecaster::choose_last(const moegguf_tokens_event & of, Record & record) {
    std::vector<LastToken> & last = record.last;
    int first = 0;
    for (int i = 0; i < of.n_tokens; i++) {
        const int sequence = of.sequences ? of.sequences[i] : of.sequence;
        if (i + 1 == of.n_tokens || (of.sequences && of.sequences[i + 1] != sequence)) {
            last.push_back({sequence, i, i + 1 - first});
            first = i + 1;
        }
    }
    const size_t n = last.size();
    record.n_sequences = (int)n;
    for (size_t i = 0; n > most_selected && i < most_selected; i++) { last[i] = last[i * n / most_selected]; }
    last.resize(std::min(n, (size_t)most_selected));
    for (LastToken & each : last) {
        each.first_known = record.tokens.size();
        each.n_known = of.tokens ? std::min(each.n_tokens, most_known) : 0;
        if (each.n_known) {
            const int32_t * end = of.tokens + each.index + 1;
            record.tokens.insert(record.tokens.end(), end - each.n_known, end);
        }
    }
}

template <typename Fill>
void Forecaster::post(const moegguf_tokens_event & of, int il, uint64_t pass, Fill fill) {
    std::unique_lock<std::mutex> lock(inbox_mutex_);
    if (!on_) { return; }
    if (size_ == ring_.size()) {
        head_ = (head_ + 1) % ring_.size();
        size_ -= 1;
    }
    Record & record = ring_[(head_ + size_) % ring_.size()];
    record.pass = pass;
    record.il = il;
    record.last.clear(); // does not free the vectors' memory
    record.tokens.clear();
    record.ids.clear();
    record.inputs.clear();
    record.scores.clear();
    try {
        choose_last(of, record);
        fill(record);
    } catch (const std::bad_alloc &) {
        return; // the record is lost, but the pass continues
    }
    if (!thread_.joinable()) { // a simulation has no thread: the caller predicts
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

// The predictor thread calls the functions of this section.

void Forecaster::run() {
    std::unique_lock<std::mutex> lock(inbox_mutex_);
    while (true) {
        arrived_.wait(lock, [this] { return stopping_ || size_ > 0; });
        if (stopping_) { return; }
        std::swap(current_, ring_[head_]);
        head_ = (head_ + 1) % ring_.size();
        size_ -= 1;
        busy_ = true;
        const bool newest = size_ == 0 || (options_.flags & MOEGGUF_PREDICT_LOCKSTEP);
        lock.unlock();
        try {
            follow(current_, newest);
        } catch (const std::bad_alloc &) {
            // out of memory: nothing is predicted from this record
        }
        lock.lock();
        busy_ = false;
        if (size_ == 0) { caught_up_.notify_all(); }
    }
}

// Updates the predictors with a record. If `newest` is true and the pass is predicted, also predicts and issues
// prefetches. `newest` is false if a later record is waiting, because that record would make the predictions obsolete.
// In lockstep, `newest` is always true, because the next pass may be announced before the last layer's record is read.
void Forecaster::follow(const Record & record, bool newest) {
    const uint64_t start = now_ns();
    const bool routed = record.il >= 0;
    if (!routed || record.pass != pass_ || layout_.row_of[record.il] <= row_) { begin_pass(record); }
    if (routed) {
        compare(record);
        select_sequences(record);
        for (size_t i = 0; i < selected_.size(); i++) { // each predictor gets only its own sequence's choices
            const LastToken & last = record.last[i];
            Observation seen{record.il, last.n_tokens, record.ids.data() + i * record.n_expert_used};
            seen.n_expert_used = record.n_expert_used;
            seen.n_embd = record.n_embd;
            seen.n_scored = record.n_scored;
            if (last.n_tokens == 1 && !record.inputs.empty()) { seen.input = record.inputs.data() + i * record.n_embd; }
            if (last.n_tokens == 1 && !record.scores.empty()) {
                seen.scores = record.scores.data() + i * (record.scores.size() / record.last.size());
            }
            predictors_[selected_[i]].predictor->on_routing(seen);
        }
        row_ = layout_.row_of[record.il];
    }
    if (newest && is_predicted_) {
        const int last = layout_.n_moe_layers - 1;
        predict(row_, std::min(row_ + options_.window, last));
        if (factory_->type->sees_next_pass && row_ == last) { // eviction policies also use predictions of the next pass
            predict(-1, last);
            Lock lock(shared_.mutex);
            for (int at = 0; at <= last; at++) {
                if (layers_[at].distance > 0) { publish_forecast(at); }
            }
            lock.unlock();
            forget();
        }
        issue_prefetches();
    }
    count(shared_.counters.forecast_ns, now_ns() - start);
}

void Forecaster::begin_pass(const Record & record) {
    pass_ = record.pass;
    row_ = -1;
    n_started_ = get(shared_.counters.prefetch_started);
    select_sequences(record);
    for (size_t i = 0; i < selected_.size(); i++) {
        const LastToken & of = record.last[i];
        predictors_[selected_[i]].predictor->on_tokens(record.tokens.data() + of.first_known, of.n_known);
    }
    forget();
}

// Selects the predictors of the record's sequences, and sets is_predicted_. This happens at each record, because the
// last layer may be computed for fewer tokens.
void Forecaster::select_sequences(const Record & record) {
    n_sequences_ = record.n_sequences;
    is_predicted_ = n_sequences_ <= most_sequences;
    for (const LastToken & last : record.last) {
        const bool known = last.n_known == 1 && record.tokens[last.first_known] >= 0;
        is_predicted_ &= last.n_tokens == 1 && (record.il >= 0 || known);
    }
    const bool one_after_another = record.last.size() == 1 && predictors_.size() == 1;
    if (one_after_another && predictors_[0].sequence != record.last[0].sequence) {
        predictors_[0].sequence = record.last[0].sequence;
        predictors_[0].predictor->on_sequence();
    }
    selected_.clear();
    for (const LastToken & last : record.last) {
        selected_.push_back(&predictor_of(last.sequence) - predictors_.data());
    }
}

// Returns the predictor of a sequence. A new sequence gets a new predictor, or the least recently used one if
// most_sequences predictors already exist.
Forecaster::SequencePredictor & Forecaster::predictor_of(int sequence) {
    const auto end = predictors_.end();
    auto found =
        std::find_if(predictors_.begin(), end, [&](const SequencePredictor & f) { return f.sequence == sequence; });
    if (found == end && predictors_.size() < most_sequences) {
        predictors_.push_back({sequence, 0, factory_->type->make(layout_, factory_->arrays)});
        found = predictors_.end() - 1;
    } else if (found == end) {
        found = std::min_element(
            predictors_.begin(), end,
            [](const SequencePredictor & a, const SequencePredictor & b) { return a.last_use < b.last_use; });
        found->sequence = sequence;
        found->predictor->on_sequence();
    }
    found->last_use = ++n_uses_;
    return *found;
}

void Forecaster::forget() {
    std::lock_guard<std::mutex> lock(layers_mutex_);
    for (LayerForecast & row : layers_) { row.distance = 0; }
}

// Compares the forecast of a layer with the experts that its router chose, for each sequence, and updates the
// calibration and counters. Then drops the forecast. Does nothing if the layer has no forecast.
void Forecaster::compare(const Record & record) {
    LayerForecast & row = layers_[layout_.row_of[record.il]];
    if (row.distance == 0) { return; }
    const int n_expert = layout_.layers[record.il].n_expert, n_used = record.n_expert_used;
    for (size_t i = 0; i < record.last.size(); i++) {
        const auto at = std::find(row.sequences.begin(), row.sequences.end(), record.last[i].sequence);
        if (at == row.sequences.end()) { continue; }
        const float * likely = &row.each[(at - row.sequences.begin()) * layout_.n_expert_max];
        const int32_t * ids = record.ids.data() + i * n_used;
        const auto used = [&](int expert) { return std::find(ids, ids + n_used, expert) != ids + n_used; };
        for (int e = 0; e < n_expert; e++) { calibration_.count(row.distance, likely[e], used(e)); }
        const int n_best = rank(likely, record.il, n_used);
        count(shared_.counters.forecast_picks, n_best);
        count(shared_.counters.forecast_right, std::count_if(best_.begin(), best_.begin() + n_best, used));
    }
    std::lock_guard<std::mutex> lock(layers_mutex_);
    row.distance = 0;
}

// Sorts the layer's most probable experts to the front of best_. Returns their number: `most`, or the layer's number of
// experts if that is smaller.
int Forecaster::rank(const float * likely, int il, int most) {
    const int n_expert = layout_.layers[il].n_expert, n_best = std::min(most, n_expert);
    std::iota(best_.begin(), best_.begin() + n_expert, 0);
    std::partial_sort(best_.begin(), best_.begin() + n_best, best_.begin() + n_expert,
                      [&](int a, int b) { return likely[a] != likely[b] ? likely[a] > likely[b] : a < b; });
    return n_best;
}

// Predicts the MoE layers after row `from`, up to row `last`. A row is the index of a layer among the MoE layers. With
// MOEGGUF_PREDICT_ONCE, layers that have a forecast are skipped.
void Forecaster::predict(int from, int last) {
    for (int at = from + 1; at <= last; at++) {
        if (layers_[at].distance > 0 && (options_.flags & MOEGGUF_PREDICT_ONCE)) { continue; }
        const int il = layout_.moe_layers[at], distance = at - from;
        if (predict_sequences(il, distance)) {
            std::lock_guard<std::mutex> lock(layers_mutex_);
            combine(layers_[at], il, distance);
        }
    }
}

// Predicts a layer for each selected sequence. Each prediction adds its sequence to predicted_sequences_, and fills the
// next row of each_. Returns false if no predictor has a prediction.
bool Forecaster::predict_sequences(int il, int distance) {
    predicted_sequences_.clear();
    for (size_t at : selected_) {
        SequencePredictor & predictor = predictors_[at];
        if (predictor.predictor->predict(il, distance, &each_[predicted_sequences_.size() * layout_.n_expert_max])) {
            predicted_sequences_.push_back(predictor.sequence);
        }
    }
    return !predicted_sequences_.empty();
}

// Computes for each expert the raw and the calibrated probability that any sequence of the pass uses the expert, from
// the predictions for individual sequences. Each sequence that was not selected is treated as an average selected one.
// A selected sequence without a prediction is treated as not using the expert.
void Forecaster::combine(LayerForecast & row, int il, int distance) {
    row.distance = distance;
    row.is_published = false;
    row.sequences = predicted_sequences_;
    row.each.assign(each_.begin(), each_.begin() + predicted_sequences_.size() * layout_.n_expert_max);
    const float weight = (float)n_sequences_ / selected_.size();
    const bool is_alone = predicted_sequences_.size() == 1 && weight == 1.0f;
    for (int e = 0; e < layout_.layers[il].n_expert; e++) {
        float unused = 1.0f, calibrated = 1.0f;
        for (size_t i = 0; i < predicted_sequences_.size(); i++) {
            const float p = row.each[i * layout_.n_expert_max + e];
            unused *= 1.0f - std::clamp(p, 0.0f, 1.0f);
            calibrated *= 1.0f - calibration_.of(distance, p);
        }
        row.likely[e] = is_alone ? row.each[e] : 1.0f - std::pow(unused, weight);
        row.chances[e] = is_alone ? calibration_.of(distance, row.each[e]) : 1.0f - std::pow(calibrated, weight);
    }
}

void Forecaster::publish_forecast(int at) {
    const int il = layout_.moe_layers[at];
    tiers_.of(il).residency.on_forecast(il, layers_[at].chances.data(), layers_[at].likely.data());
    layers_[at].is_published = true;
}

void Forecaster::issue_prefetches() {
    Lock lock(shared_.mutex);
    wants_.clear();
    for (int at = row_ + 1; at < layout_.n_moe_layers; at++) {
        LayerForecast & row = layers_[at];
        const uint64_t deadline = step_of(at);
        if (row.distance == 0 || deadline <= transfers_.step()) {
            continue; // no forecast, or the pass has already reached the layer
        }
        if (!row.is_published) { publish_forecast(at); }
        if (prefetching_) { want_layer(at, deadline); }
    }
    if (options_.flags & MOEGGUF_PREDICT_BY_PROXIMITY) { // the order of MoE-Infinity, section 4.5
        const auto priority = [&](const Want & want) {
            const int at = layout_.row_of[want.il];
            return layers_[at].likely[want.expert] * (1.0f - (float)(at - row_) / layout_.n_moe_layers);
        };
        std::stable_sort(wants_.begin(), wants_.end(),
                         [&](const Want & a, const Want & b) { return priority(a) > priority(b); });
    }
    const uint64_t n_started = get(shared_.counters.prefetch_started) - n_started_, most = options_.most_prefetches;
    const size_t n_left = most > n_started ? most - n_started : 0;
    wants_.resize(std::min(wants_.size(), n_left));
    transfers_.forget(Cause::forecast); // the new prefetches replace the earlier ones
    for (const Want & want : wants_) { transfers_.want(want); }
    transfers_.wake_idle_reader();
}

// Adds prefetches of a layer's most probable experts, up to the number that the pass's tokens can use, and skips
// experts that have a slot. The worth of a prefetch is its expected gain minus its expected cost, and must be above 0.
// If the expert is used, the gain is the share of the transfer that ends before the layer is reached. If the expert is
// not used, the cost is waste_weight, because the transfer keeps the link busy. With waste_weight 0, the worth is
// infinite. A prefetch may evict only an expert that is worth less.
void Forecaster::want_layer(int at, uint64_t deadline) {
    const LayerForecast & row = layers_[at];
    const int il = layout_.moe_layers[at];
    const float saved = transfers_.share_in_time(at - row_);
    // Raw probabilities are rarely equal. Calibrated probabilities often are, because all experts in a bin share one.
    const std::vector<float> & order = n_sequences_ == 1 ? row.likely : row.chances;
    const int n_best = rank(order.data(), il, layout_.layers[il].n_expert_used * n_sequences_);
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
