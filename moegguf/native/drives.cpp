// drives.cpp: implements drives.h: chooses the drive, and so the copy of the model's files, for each read.
#include "drives.h"

#include "clock.h"

#include <algorithm>
#include <cstdio>

namespace moegguf {
namespace {

// A drive that has finished fewer reads than this is assumed to be faster than any other drive
// (unmeasured_ns_per_byte), because its first reads may not be typical.
constexpr uint64_t first_reads = 8;
constexpr float unmeasured_ns_per_byte = 1e-4f;

constexpr uint64_t averaged_reads = 32;

// Each read from another drive multiplies an idle drive's measured time per byte by this factor, so that the idle drive
// is tried again now and then. A drive that takes 10 times as long gets about one read in 1,200, and a drive that takes
// 100 times as long about one in 2,400.
constexpr float idle_factor = 1 - 1.0f / 512;

} // namespace

Drives::Drives(const Layout & layout, bool direct) {
    drives_.resize(1 + layout.mirrors.size());
    drives_[0].shards = open_shards(layout, layout.shards, direct);
    for (size_t i = 0; i < layout.mirrors.size(); i++) {
        Drive & mirror = drives_[1 + i];
        try {
            mirror.shards = open_shards(layout, layout.mirrors[i], direct);
            for (size_t n = 0; n < mirror.shards.size(); n++) { drives_[0].shards[n]->check_copy(*mirror.shards[n]); }
        } catch (const Error & error) {
            if (error.status != MOEGGUF_IO) { throw; }
            mirror.dropped = error.what();
        }
    }
}

// Returns the expected time in ns until n more bytes have been read. If reads are under way, the result is at least the
// time since silent_ns.
float Drives::Drive::expected_ns(size_t n, uint64_t now) const {
    const float silent = under_way > 0 ? float(now - silent_ns) : 0;
    return std::max(silent, float(under_way + n) * (n_reads >= first_reads ? ns_per_byte : unmeasured_ns_per_byte));
}

const uint8_t * Drives::read(int shard, uint64_t offset, size_t n, const ReadBuffer & buffer, uint64_t & retries) {
    while (true) {
        const Turn turn = begin(n);
        try {
            const uint8_t * data = turn.drive.shards[shard]->read(offset, n, buffer, retries);
            end(turn, n);
            return data;
        } catch (const Error & error) {
            if (!drop(turn, n, error.what())) { throw; }
        }
    }
}

bool Drives::is_read(const Drive & drive) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return drive.dropped.empty();
}

const uint8_t * Drives::read_row(int shard, uint64_t offset, size_t n, const ReadBuffer & buffer,
                                 uint64_t & retries) const {
    std::string why;
    for (const Drive & drive : drives_) {
        if (!is_read(drive)) { continue; }
        try {
            return drive.shards[shard]->read(offset, n, buffer, retries, /*cached =*/true);
        } catch (const Error & error) { why = error.what(); }
    }
    throw Error(MOEGGUF_IO, why);
}

const Shard & Drives::first_shard(int shard) const {
    const auto drive = std::find_if(drives_.begin(), drives_.end(), [this](const Drive & d) { return is_read(d); });
    return *drive->shards[shard]; // one drive is always read
}

Drives::Turn Drives::begin(size_t n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t now = now_ns();
    Drive * first = nullptr;
    for (Drive & drive : drives_) {
        const bool is_sooner = !first || drive.expected_ns(n, now) < first->expected_ns(n, now);
        if (drive.dropped.empty() && is_sooner) { first = &drive; }
    }
    for (Drive & drive : drives_) {
        if (&drive != first && drive.under_way == 0) { drive.ns_per_byte *= idle_factor; }
    }
    if (first->under_way == 0) { first->silent_ns = now; }
    first->under_way += n;
    return {*first, now, first->under_way};
}

// Records the end of a read of n bytes, and updates the drive's average time per byte. The time of the read is divided
// by the number of bytes that were under way when it began, because the drive may deliver them in any order.
void Drives::end(const Turn & turn, size_t n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Drive & drive = turn.drive;
    drive.under_way -= n;
    drive.silent_ns = now_ns();
    drive.n_reads++;
    drive.n_bytes += n;
    const float measured = float(drive.silent_ns - turn.begun_ns) / float(turn.under_way);
    drive.ns_per_byte += (measured - drive.ns_per_byte) / std::min(drive.n_reads, averaged_reads);
}

bool Drives::drop(const Turn & turn, size_t n, const char * why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    turn.drive.under_way -= n;
    const auto is_read = [](const Drive & drive) { return drive.dropped.empty(); };
    if (is_read(turn.drive)) {
        if (std::count_if(drives_.begin(), drives_.end(), is_read) == 1) { return false; }
        turn.drive.dropped = why;
    }
    return true; // the bytes can be read from another drive
}

bool Drives::direct() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::all_of(drives_.begin(), drives_.end(), [](const Drive & drive) {
        return !drive.dropped.empty() || std::all_of(drive.shards.begin(), drive.shards.end(),
                                                     [](const auto & shard) { return shard->direct(); });
    });
}

void Drives::describe(size_t index, moegguf_drive_info & info) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Drive & drive = drives_[index];
    info = {};
    info.reads = drive.n_reads;
    info.bytes = drive.n_bytes;
    info.bytes_per_s = drive.ns_per_byte > 0 ? uint64_t(1e9f / drive.ns_per_byte) : 0;
    info.dropped = !drive.dropped.empty();
    snprintf(info.note, sizeof(info.note), "%s", drive.dropped.c_str());
}

} // namespace moegguf
