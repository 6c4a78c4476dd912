#include "store.h"

#include "clock.h"
#include "fault.h"
#include "reserved.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <system_error>

namespace moegguf {
namespace {

constexpr int max_readers = 64;
constexpr double longest_probe_s = 3600;

int checked_readers(const moegguf_config & config) {
    if (config.n_readers < 1 || config.n_readers > max_readers) {
        throw Error(MOEGGUF_INVALID, "readers must be between 1 and " + std::to_string(max_readers) + ", not " +
                                         std::to_string(config.n_readers));
    }
    return config.n_readers;
}

int count_chunks(const Layout & layout) {
    int n = 0;
    for (const Matrix & m : layout.matrices) {
        n += m.n_expert;
    }
    return n;
}

} // namespace

Store::Store(const moegguf_config & config)
    : layout_(config),
      flags_(config.flags),
      n_readers_(checked_readers(config)),
      pid_(getpid()),
      residency_(layout_),
      buft_(make_reserved_buft(this), free_reserved_buft),
      n_absent_chunks_(count_chunks(layout_)) {
    link_.bytes_per_ns = config.sim_bytes_per_ns;
    link_.latency_ns = config.sim_latency_ns;
    if (flags_ & MOEGGUF_SIMULATE) {
        return;
    }
    files_ = std::make_unique<Files>(layout_, flags_ & MOEGGUF_DIRECT);
    pool_ = std::make_unique<Pool>(layout_, config.device, flags_ & MOEGGUF_REPACK);
    uint64_t piece = 0;
    for (const Matrix & m : layout_.matrices) {
        piece = std::max(piece, std::min(m.expert_bytes, piece_bytes(m)));
    }
    for (int i = 0; i < n_readers_; i++) {
        staging_.push_back(std::make_unique<Staging>(piece + Shard::alignment));
    }
    readers_.reserve(n_readers_);
    try {
        for (int i = 0; i < n_readers_; i++) {
            if (fault(MOEGGUF_FAULT_THREAD)) {
                throw std::system_error(errno, std::generic_category());
            }
            readers_.emplace_back([this, i] { run_reader(i); });
        }
    } catch (const std::system_error & e) {
        if (readers_.empty()) {
            throw Error(MOEGGUF_MEMORY, std::string("cannot start a reader thread: ") + e.what());
        }
    }
}

Store::~Store() {
    {
        Lock lock(mutex_);
        stopping_ = true;
    }
    work_.notify_all();
    done_.notify_all();
    for (std::thread & reader : readers_) {
        forked() ? reader.detach() : reader.join();
    }
    events_.stop();
}

bool Store::forked() const {
    return getpid() != pid_;
}

ggml_backend_buffer_type_t Store::buft() {
    return buft_.get();
}

ggml_tensor * Store::pool_tensor(const char * name) const {
    for (size_t i = 0; i < layout_.matrices.size(); i++) {
        if (layout_.matrices[i].name == name) {
            return pool_->tensor((int)i);
        }
    }
    return nullptr;
}

std::unique_ptr<Lane> Store::open_lane() {
    Lock lock(mutex_);
    auto lane = std::make_unique<Lane>(*this, lane_ids_++);
    lane->slot_of.assign(layout_.n_expert_max, -1);
    n_lanes_ += 1;
    return lane;
}

void Store::close_lane(Lane & lane) {
    Lock lock(mutex_);
    unpin(lane);
    n_lanes_ -= 1;
    done_.notify_all();
}

void Store::take_failure(Lane & lane, moegguf_failure & out, bool clear) {
    if (forked()) {
        out = lane.failure; // the lock may be held by a thread of the parent
        return;
    }
    Lock lock(mutex_);
    out = lane.failure;
    if (clear) {
        lane.failure = {};
        lane.failed = false;
        lane.il = Lane::between_passes;
        unpin(lane);
    }
}

void Store::set_scores(const float * scores, size_t n) {
    Lock lock(mutex_);
    const size_t expected = layout_.layers.size() * layout_.n_expert_max;
    if (scores && n != expected) {
        throw Error(MOEGGUF_INVALID,
                    "a score table has " + std::to_string(expected) + " entries, not " + std::to_string(n));
    }
    residency_.set_scores(scores, scores ? n : 0);
}

void Store::set_rates(const moegguf_rates * rates) {
    Lock lock(mutex_);
    residency_.set_rates(rates);
}

void Store::prefetch(const int32_t * il, const int32_t * experts, size_t n) {
    Lock lock(mutex_);
    constexpr size_t most = 4096; // more than any link moves before they are stale
    for (size_t i = 0; i < n; i++) {
        const bool exists = il[i] >= 0 && il[i] < (int)layout_.layers.size() && experts[i] >= 0 &&
                            experts[i] < layout_.layers[il[i]].n_expert;
        counters_.prefetch_requested += 1;
        if (!exists || residency_.find(il[i], experts[i]) >= 0 || wishes_.size() >= most) {
            counters_.prefetch_dropped += 1;
            continue;
        }
        wishes_.push({il[i], experts[i]});
    }
    work_.notify_all();
}

void Store::listen(const moegguf_listener * listener) {
    if (listener) {
        events_.start(*listener);
    } else {
        events_.stop();
    }
}

void Store::cancel(bool on) {
    Lock lock(mutex_);
    cancel_ = on;
    done_.notify_all();
}

void Store::resize(int n_slots) {
    Lock lock(mutex_);
    int widest = 0;
    for (const Layer & layer : layout_.layers) {
        widest = std::max(widest, layer.n_expert_used);
    }
    if (n_slots < widest || n_slots > residency_.n_slots()) {
        throw Error(MOEGGUF_INVALID, "the pool can have " + std::to_string(widest) + " to " +
                                         std::to_string(residency_.n_slots()) + " slots, not " +
                                         std::to_string(n_slots));
    }
    if (residency_.resident() && n_lanes_ > 1) {
        throw Error(MOEGGUF_INVALID, "a fully resident pool with several contexts keeps its size");
    }
    resize_to_ = n_slots;
    if (counters_.gates == 0) {
        apply_resize(); // later, only a gate knows that no layer is being computed
    }
}

bool Store::drain(double timeout_s) {
    Lock lock(mutex_);
    const auto idle = [this] {
        const bool filling = (flags_ & MOEGGUF_FILL) && residency_.resident() && read_error_.empty() &&
                             fill_next_ < (int)layout_.layers.size() * layout_.n_expert_max;
        return needed_.empty() && wanted_.empty() && wishes_.empty() && counters_.chunks_reading == 0 && !filling;
    };
    if (flags_ & MOEGGUF_SIMULATE) {
        while (!idle()) {
            sim_step();
        }
        return true;
    }
    constexpr double longest_s = 1e7;
    const double limit_s = timeout_s > 0 ? std::min(timeout_s, longest_s) : 0;
    return done_.wait_for(lock, std::chrono::duration<double>(limit_s), idle);
}

void Store::read_slot(int matrix, int slot, void * out, size_t n) {
    if (!pool_ || matrix < 0 || matrix >= (int)layout_.matrices.size() || slot < 0 || slot >= layout_.n_slots ||
        n != layout_.matrices[matrix].expert_bytes || pool_->repacked(matrix)) {
        throw Error(MOEGGUF_INVALID, "no plain slot of that size");
    }
    pool_->read(matrix, slot, out);
}

// Random experts through descriptors, block alignment and reader count as the store uses them, without uploads.
double Store::probe(double seconds) const {
    if (!files_ || !(seconds > 0 && seconds <= longest_probe_s)) {
        throw Error(MOEGGUF_INVALID, "a probe reads the files of a store for some seconds");
    }
    std::atomic<uint64_t> bytes{0};
    const uint64_t start = now_ns(), end = start + uint64_t(seconds * 1e9);
    std::vector<std::thread> threads;
    std::atomic<bool> failed{false};
    const auto read_random = [&](int i) {
        try {
            std::minstd_rand random(uint32_t(start) + i);
            Staging staging(staging_[i]->size());
            ReadStats stats;
            while (now_ns() < end) {
                const Matrix & m = layout_.matrices[random() % layout_.matrices.size()];
                const uint64_t n = std::min(m.expert_bytes, piece_bytes(m));
                (*files_)[m.shard].read(m.offset + random() % m.n_expert * m.expert_bytes, n, staging, stats);
                bytes += n;
            }
        } catch (const Error &) {
            failed = true;
        }
    };
    threads.reserve(readers_.size());
    try {
        for (size_t i = 0; i < readers_.size(); i++) {
            threads.emplace_back(read_random, (int)i);
        }
    } catch (const std::system_error &) {
        failed = true;
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    if (failed) {
        throw Error(MOEGGUF_IO, "the expert file could not be read");
    }
    return bytes * 1e9 / (now_ns() - start);
}

void Store::counters(moegguf_counters & out) const {
    Lock lock(mutex_);
    out = counters_;
    out.events_dropped = events_.dropped();
    out.slots_used = residency_.n_used();
    for (int s = 0; s < residency_.n_slots(); s++) {
        out.slots_pinned += residency_.slot(s).pins > 0;
    }
    out.queue_needed = needed_.size();
    out.queue_wanted = wanted_.size() + wishes_.size();
    out.sim_clock_ns = link_.clock_ns;
}

void Store::info(moegguf_pool_info & out) const {
    Lock lock(mutex_);
    out.slot_bytes = layout_.slot_bytes();
    out.pool_bytes = pool_ ? pool_->bytes() : 0;
    out.staging_bytes = staging_.empty() ? 0 : staging_.size() * staging_[0]->size();
    out.n_slots = residency_.n_slots();
    out.n_slots_usable = residency_.n_usable();
    out.n_experts = layout_.n_experts;
    out.n_layers = layout_.n_moe_layers;
    out.n_repacked = pool_ ? pool_->n_repacked() : 0;
    out.n_matrices = (int)layout_.matrices.size();
    out.resident = residency_.resident();
    out.direct = files_ && files_->direct();
}

void Store::residency(uint8_t * map, size_t n) const {
    Lock lock(mutex_);
    if (n != layout_.layers.size() * layout_.n_expert_max) {
        throw Error(MOEGGUF_INVALID, "the map has one byte per layer and expert");
    }
    memset(map, 0, n);
    for (int s = 0; s < residency_.n_slots(); s++) {
        const Slot & slot = residency_.slot(s);
        if (slot.il >= 0) {
            map[layout_.key(slot.il, slot.expert)] = slot.ready == layout_.layers[slot.il].chunks ? 2 : 1;
        }
    }
}

void Store::activity(uint32_t * uses, uint32_t * loads, size_t n) const {
    Lock lock(mutex_);
    if (n != residency_.uses().size()) {
        throw Error(MOEGGUF_INVALID, "activity has two numbers per layer and expert");
    }
    std::copy(residency_.uses().begin(), residency_.uses().end(), uses);
    std::copy(residency_.loads().begin(), residency_.loads().end(), loads);
}

void Store::watch(bool on) {
    Lock lock(mutex_);
    watched_ = on;
}

} // namespace moegguf
