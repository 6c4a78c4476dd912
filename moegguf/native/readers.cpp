#include "readers.h"

#include "threads.h"

#include <algorithm>

namespace moegguf {

Readers::Readers(const Layout & layout, Shared & shared, const Tiers & tiers, Link & link, int n)
    : layout_(layout),
      shared_(shared),
      tiers_(tiers),
      link_(link),
      files_(layout, shared.has(MOEGGUF_DIRECT)) {
    uint64_t piece = 0;
    for (const Matrix & m : layout.matrices) { piece = std::max(piece, std::min(m.expert_bytes, piece_bytes(m))); }
    for (int i = 0; i < n; i++) { buffers_.push_back(std::make_unique<ReadBuffer>(piece + Shard::alignment)); }
    threads_.reserve(n);
    try {
        for (int i = 0; i < n; i++) {
            threads_.push_back(start_thread("a reader thread", [this, i] { run(*buffers_[i]); }));
        }
    } catch (const Error &) {
        if (threads_.empty()) { // fewer do
            throw;
        }
    }
}

Readers::~Readers() {
    {
        Lock lock(shared_.mutex);
        shared_.stopping = true;
    }
    shared_.work.notify_all();
    shared_.done.notify_all();
    for (std::thread & thread : threads_) { thread.join(); }
}

void Readers::run(const ReadBuffer & buffer) {
    Lock lock(shared_.mutex);
    while (!shared_.stopping) {
        Job job;
        if (!link_.begin_next(job)) {
            shared_.work.wait(lock);
            continue;
        }
        lock.unlock();

        ReadStats stats;
        uint64_t upload_ns = 0;
        std::string why;
        try {
            read(job, buffer, stats, upload_ns);
        } catch (const std::exception & e) { // memory, too
            why = e.what();
        }
        count(shared_.counters.read_ns, stats.read_ns);
        count(shared_.counters.read_retries, stats.retries);
        count(shared_.counters.upload_ns, upload_ns);

        lock.lock();
        link_.finish(job, why);
    }
}

void Readers::read(const Job & job, const ReadBuffer & buffer, ReadStats & stats, uint64_t & upload_ns) {
    const Pool & pool = *tiers_.of(job.destination, job.il).pool();
    for (uint8_t kinds = job.kinds; kinds; kinds &= kinds - 1) {
        const int matrix = layout_.layers[job.il].matrix[__builtin_ctz(kinds)];
        const Matrix & m = layout_.matrices[matrix];
        const uint64_t row_bytes = m.expert_bytes / m.ne1;
        const int64_t step = piece_bytes(m) / row_bytes;
        for (int64_t row = 0; row < m.ne1; row += step) {
            const int64_t n_rows = std::min(step, m.ne1 - row);
            const uint64_t offset = m.offset + job.expert * m.expert_bytes + row * row_bytes;
            const uint8_t * data = files_[m.shard].read(offset, n_rows * row_bytes, buffer, stats);
            const uint64_t start = now_ns();
            Lock one_at_a_time(upload_, std::defer_lock);
            if (!pool.host()) { one_at_a_time.lock(); }
            pool.write(matrix, job.destination.slot, row, n_rows, data);
            upload_ns += now_ns() - start;
        }
    }
}

} // namespace moegguf
