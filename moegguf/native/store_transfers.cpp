// store_transfers.cpp: from the queues to the slots. Runs on reader threads, or on a modelled clock.
#include "clock.h"
#include "store.h"

#include <algorithm>
#include <bitset>
#include <cmath>

namespace moegguf {
namespace {

uint8_t lowest_bit(uint8_t bits) {
    return bits & -bits;
}

int kind_index(uint8_t bit) {
    return __builtin_ctz(bit);
}

} // namespace

void Store::queue(int s, uint8_t kinds, bool needed) {
    Slot & slot = residency_.slot(s);
    const bool whole = !needed && !(flags_ & MOEGGUF_CHUNKED);
    while (kinds) {
        const uint8_t bits = whole ? kinds : lowest_bit(kinds);
        (needed ? needed_ : wanted_).push({s, slot.generation, bits, needed, slot.claims});
        slot.queued |= bits;
        kinds &= ~bits;
    }
}

// The next transfer worth making. Jobs whose slot changed hands or whose matrix came another way are passed over.
bool Store::next_job(Job & job) {
    const bool had_any = !needed_.empty() || !wanted_.empty() || !wishes_.empty();
    for (Ring<Job> * ring : {&needed_, &wanted_}) {
        while (!ring->empty()) {
            job = ring->pop();
            Slot & slot = residency_.slot(job.slot);
            if (slot.generation != job.generation) {
                continue;
            }
            job.kinds &= slot.queued & ~slot.ready & ~slot.reading;
            if (job.kinds && !slot.failed) {
                return true;
            }
        }
    }
    while (!wishes_.empty()) {
        const Wish wish = wishes_.pop();
        if (start_wish(wish.il, wish.expert, job)) {
            return true;
        }
        counters_.prefetch_dropped += 1;
    }
    if (had_any) {
        done_.notify_all(); // whoever drains waits for empty queues
    }
    return next_fill(job);
}

bool Store::start_wish(int il, int expert, Job & job) {
    if (short_of_slots_ || residency_.find(il, expert) >= 0) {
        return false;
    }
    const float worth = residency_.judged(now_) ? residency_.worth(il, expert, now_) : INFINITY;
    const int s = take_slot(il, expert, now_, worth);
    if (s < 0) {
        return false;
    }
    residency_.slot(s).prefetched = true;
    counters_.prefetch_started += 1;
    queue(s, layout_.layers[il].chunks, false);
    work_.notify_all(); // for the matrices that this reader does not take
    job = wanted_.pop();
    return true;
}

bool Store::next_fill(Job & job) {
    if (!(flags_ & MOEGGUF_FILL) || !residency_.resident() || !read_error_.empty()) {
        return false;
    }
    const int n = (int)layout_.layers.size() * layout_.n_expert_max;
    for (; fill_next_ < n; fill_next_++) {
        const int il = fill_next_ / layout_.n_expert_max, expert = fill_next_ % layout_.n_expert_max;
        if (expert < layout_.layers[il].n_expert && start_wish(il, expert, job)) {
            residency_.slot(job.slot).prefetched = false; // nobody predicted it
            counters_.prefetch_started -= 1;
            return true;
        }
    }
    return false;
}

void Store::run_reader(int index) {
    Lock lock(mutex_);
    while (!stopping_) {
        Job job;
        if (!next_job(job)) {
            work_.wait(lock);
            continue;
        }
        Slot & slot = residency_.slot(job.slot);
        slot.queued &= ~job.kinds;
        slot.reading |= job.kinds;
        counters_.chunks_reading += 1;
        const Slot snapshot = slot;
        lock.unlock();

        ReadStats stats;
        uint64_t upload_ns = 0;
        std::string why;
        try {
            transfer(job, snapshot, *staging_[index], stats, upload_ns);
        } catch (const Error & e) {
            why = e.what();
        }

        lock.lock();
        counters_.read_ns += stats.read_ns;
        counters_.read_retries += stats.retries;
        counters_.upload_ns += upload_ns;
        counters_.chunks_reading -= 1;
        finish(job, why.empty(), why);
    }
}

void Store::transfer(const Job & job, const Slot & slot, const Staging & staging, ReadStats & stats,
                     uint64_t & upload_ns) {
    for (uint8_t kinds = job.kinds; kinds; kinds &= kinds - 1) {
        const int index = layout_.layers[slot.il].matrix[kind_index(lowest_bit(kinds))];
        const Matrix & m = layout_.matrices[index];
        const uint64_t row_bytes = m.expert_bytes / m.ne1;
        const int64_t step = piece_bytes(m) / row_bytes;
        for (int64_t row = 0; row < m.ne1; row += step) {
            const int64_t n_rows = std::min(step, m.ne1 - row);
            const uint64_t offset = m.offset + slot.expert * m.expert_bytes + row * row_bytes;
            const uint8_t * data = (*files_)[m.shard].read(offset, n_rows * row_bytes, staging, stats);
            const uint64_t start = now_ns();
            if (pool_->host()) {
                pool_->write(index, job.slot, row, n_rows, data);
            } else {
                std::lock_guard<std::mutex> one_at_a_time(upload_);
                pool_->write(index, job.slot, row, n_rows, data);
            }
            upload_ns += now_ns() - start;
        }
    }
}

uint64_t Store::job_bytes(const Job & job) const {
    const Slot & slot = residency_.slot(job.slot);
    uint64_t bytes = 0;
    for (uint8_t kinds = job.kinds; kinds; kinds &= kinds - 1) {
        bytes += layout_.matrices[layout_.layers[slot.il].matrix[kind_index(lowest_bit(kinds))]].expert_bytes;
    }
    return bytes;
}

// A slot being read is never given away, so the job's generation still holds here.
void Store::finish(const Job & job, bool ok, const std::string & why) {
    Slot & slot = residency_.slot(job.slot);
    slot.reading &= ~job.kinds;
    counters_.reads += 1;
    if (ok) {
        slot.ready |= job.kinds;
        (job.needed ? counters_.bytes_missed : counters_.bytes_prefetched) += job_bytes(job);
        n_absent_chunks_ -= (int)std::bitset<8>(job.kinds).count();
    } else {
        counters_.read_errors += 1;
        read_error_ = why;
        // A read from before the last gate asked says nothing about that gate's request: it gets one of its own.
        if (slot.pins > 0 && slot.claims != job.claims) {
            queue(job.slot, job.kinds, true);
            work_.notify_one();
        } else {
            slot.failed = true;
        }
    }
    const uint8_t chunks = layout_.layers[slot.il].chunks;
    if (slot.ready == chunks) {
        announce(job.slot, true);
    } else if (slot.pins == 0 && slot.reading == 0 && (slot.queued == 0 || slot.failed)) {
        retire(job.slot);
    }
    if (slot.il >= 0 && slot.pins == 0 && slot.reading == 0 && job.slot >= residency_.n_usable()) {
        counters_.evictions += 1;
        retire(job.slot);
    }
    done_.notify_all();
}

void Store::announce(int s, bool resident) {
    if (!events_.on()) {
        return;
    }
    const Slot & slot = residency_.slot(s);
    events_.residency({now_ns(), slot.il, slot.expert, s, resident});
}

// One step of the modelled link: finish the transfer in flight, or start the next.
void Store::sim_step() {
    if (!link_.busy) {
        Job job;
        if (!next_job(job)) {
            return;
        }
        Slot & slot = residency_.slot(job.slot);
        slot.queued &= ~job.kinds;
        slot.reading |= job.kinds;
        counters_.chunks_reading += 1;
        link_.start(job, job_bytes(job));
        return;
    }
    link_.clock_ns = std::max(link_.clock_ns, link_.done_ns);
    link_.busy = false;
    counters_.chunks_reading -= 1;
    finish(link_.job, true, {});
}

void Store::advance(uint64_t ns) {
    Lock lock(mutex_);
    const uint64_t end = link_.clock_ns + ns;
    while (true) {
        if (!link_.busy) {
            sim_step();
        }
        if (!link_.busy || link_.done_ns > end) {
            break;
        }
        sim_step();
    }
    link_.clock_ns = end;
}

} // namespace moegguf
