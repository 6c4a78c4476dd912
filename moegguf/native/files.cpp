// files.cpp: implements files.h: reads a model's files, bypassing the page cache if O_DIRECT is requested and works,
// and detects writes to a file after the model was loaded.
#include "files.h"

#include "huge_pages.h"
#include "os.h"
#include "shared.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace moegguf {
namespace {

// Number of bytes that are read both with and without O_DIRECT, and then compared. One block is enough, because a file
// system that returns wrong bytes with O_DIRECT is expected to do so on the first block, too.
constexpr size_t check_bytes = Shard::alignment;

// A read fails when signals have interrupted it this many times, because it would probably never end.
constexpr int most_interruptions = 1000;

uint64_t down(uint64_t n) { return n / Shard::alignment * Shard::alignment; }
uint64_t up(uint64_t n) { return down(n + Shard::alignment - 1); }

int64_t ns(const timespec & time) { return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec; }

// Returns true if something other than a write can explain a new change time (ctime): another name, owner, mode or
// number of hard links. Since there may have been a write as well, the caller also compares a sample of the bytes.
bool may_be_renamed(const struct stat & before, const struct stat & now, const std::string & path) {
    struct stat named;
    return before.st_nlink != now.st_nlink || before.st_mode != now.st_mode || before.st_uid != now.st_uid ||
           before.st_gid != now.st_gid || stat(path.c_str(), &named) != 0 || named.st_ino != now.st_ino ||
           named.st_dev != now.st_dev;
}

// Returns the sampled spans of a shard: for each of its expert tensors, up to one page that starts at the tensor's
// middle.
std::vector<Span> sampled_spans(const Layout & layout, int shard) {
    std::vector<Span> spans;
    for (const Matrix & m : layout.matrices) {
        const uint64_t n_bytes = layout.layers[m.il].n_expert * m.expert_bytes, half = n_bytes / 2;
        if (m.shard == shard) { spans.push_back({m.offset + half, std::min(n_bytes - half, Shard::alignment)}); }
    }
    return spans;
}

} // namespace

// Allocates whole huge pages, unless the buffer needs at most half of one.
ReadBuffer::ReadBuffer(size_t n) {
    n = up(n) + Shard::alignment;
    const bool huge = n > huge_page_bytes / 2;
    n = huge ? (n + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes : n;
    data_ = (uint8_t *)os().aligned_alloc(huge ? huge_page_bytes : Shard::alignment, n);
    if (!data_) { throw Error(MOEGGUF_MEMORY, "no memory for a read buffer of " + std::to_string(n) + " bytes"); }
    ask_for_huge_pages(data_, n);
}

ReadBuffer::~ReadBuffer() { free(data_); }

Descriptor::~Descriptor() {
    if (fd >= 0) { close(fd); }
}

Shard::Shard(const std::string & path, bool direct, std::vector<Span> sampled)
    : path_(path),
      sampled_(std::move(sampled)),
      buffered_(os().open(path.c_str(), O_RDONLY | O_CLOEXEC)),
      direct_(direct && buffered_.fd >= 0 ? os().open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT) : -1) {
    if (buffered_.fd < 0) { throw Error(MOEGGUF_IO, "cannot open '" + path + "': " + strerror(errno)); }
    opened_ = checked_ = status();
    changed_ns_ = ns(opened_.st_ctim);
    sample_ = sample();
    if (direct_.fd < 0) { return; }
    ReadBuffer a(check_bytes), b(check_bytes);
    const ssize_t via_cache = os().pread(buffered_.fd, a.data(), check_bytes, 0);
    const ssize_t via_disk = os().pread(direct_.fd, b.data(), check_bytes, 0);
    use_direct_ = via_cache > 0 && via_cache == via_disk && memcmp(a.data(), b.data(), via_cache) == 0;
}

struct stat Shard::status() const {
    struct stat now;
    if (os().fstat(buffered_.fd, &now) != 0) {
        throw Error(MOEGGUF_IO, "cannot stat '" + path_ + "': " + strerror(errno));
    }
    return now;
}

std::vector<Shard::Sample> Shard::sample() const {
    for (const Span & span : sampled_) { read_ahead(span.offset, span.n); } // the disk reads all spans at the same time
    std::vector<Sample> samples;
    std::vector<uint8_t> data(alignment);
    for (const Span & span : sampled_) {
        int error = 0;
        const bool is_read = fill(buffered_.fd, data.data(), span.offset, span.n, span.n, error) ||
                             fill(buffered_.fd, data.data(), span.offset, span.n, span.n, error);
        if (is_read) {
            samples.push_back({XXH3_64bits(data.data(), span.n), 0});
        } else { // no exception: if the error persists, a later read of these bytes reports it
            samples.push_back({0, error});
        }
    }
    return samples;
}

void Shard::check_copy(const Shard & copy) const {
    const auto refuse = [&](const std::string & why) {
        throw Error(MOEGGUF_INVALID, "a mirror must be a copy of the model's file on another drive, but '" +
                                         copy.path_ + "' " + why + ": copy '" + path_ +
                                         "' there again, or leave the mirror out");
    };
    if (copy.opened_.st_dev == opened_.st_dev && copy.opened_.st_ino == opened_.st_ino) { refuse("is that file"); }
    if (copy.opened_.st_size != opened_.st_size) {
        refuse("has " + std::to_string(copy.opened_.st_size) + " bytes instead of " + std::to_string(opened_.st_size));
    }
    for (size_t i = 0; i < sampled_.size(); i++) {
        const Span & span = sampled_[i];
        if (copy.sample_[i].error) { throw copy.cannot_read(span.offset, span.n, copy.sample_[i].error); }
        if (sample_[i].error == 0 && copy.sample_[i].digest != sample_[i].digest) {
            refuse("has other bytes at " + std::to_string(span.offset));
        }
    }
}

Error Shard::cannot_read(uint64_t offset, size_t n, int error) const {
    return Error(MOEGGUF_IO, "cannot read " + std::to_string(n) + " bytes at " + std::to_string(offset) + " of '" +
                                 path_ + "': " + strerror(error));
}

bool Shard::may_be_same(const struct stat & now) const {
    return now.st_size == opened_.st_size && ns(now.st_mtim) == ns(opened_.st_mtim);
}

void Shard::check_unchanged() const {
    struct stat now = status();
    if (may_be_same(now) && ns(now.st_ctim) == changed_ns_) { return; }
    const std::lock_guard<std::mutex> lock(checking_);
    now = status(); // another reader may have accepted the new change time meanwhile
    const bool is_accepted = ns(now.st_ctim) == ns(checked_.st_ctim);
    if (may_be_same(now) && (is_accepted || (may_be_renamed(checked_, now, path_) && sample() == sample_))) {
        checked_ = now;
        changed_ns_ = ns(now.st_ctim);
        return;
    }
    throw Error(MOEGGUF_IO, "'" + path_ + "' was written to after the model was loaded (" +
                                std::to_string(opened_.st_size) + " bytes then, " + std::to_string(now.st_size) +
                                " now): load the model again");
}

bool Shard::fill(int fd, uint8_t * data, uint64_t offset, size_t n, size_t needed, int & error) const {
    const bool aligned = fd == direct_.fd;
    size_t done = 0;
    int interruptions = 0;
    while (done < needed) {
        const ssize_t got = os().pread(fd, data + done, n - done, offset + done);
        if (got < 0 && errno == EINTR && ++interruptions < most_interruptions) { continue; }
        if (got < 0) {
            error = errno;
            return false;
        }
        if (done + got >= needed) { return true; }
        // The next read with O_DIRECT must start at the beginning of a block, even if the last read ended inside a
        // block.
        const size_t next = aligned ? down(done + got) : done + got;
        if (next == done) {
            error = ENODATA;
            return false;
        }
        done = next;
    }
    return true;
}

void Shard::read_ahead(uint64_t offset, size_t n) const {
#ifdef POSIX_FADV_WILLNEED
    posix_fadvise(buffered_.fd, (off_t)offset, (off_t)n, POSIX_FADV_WILLNEED);
#endif
}

bool Shard::read_cached(uint64_t offset, size_t n, uint8_t * to) const {
    struct stat now;
    return os().pread_cached(buffered_.fd, to, n, offset) == (ssize_t)n && os().fstat(buffered_.fd, &now) == 0 &&
           may_be_same(now) && ns(now.st_ctim) == changed_ns_;
}

const uint8_t * Shard::read(uint64_t offset, size_t n, const ReadBuffer & buffer, uint64_t & retries,
                            bool cached) const {
    int error = 0;
    for (int attempt = 0; attempt < 2; attempt++) {
        const bool direct = use_direct_ && !cached;
        const uint64_t begin = direct ? down(offset) : offset;
        const uint64_t end = direct ? up(offset + n) : offset + n;
        if (fill(direct ? direct_.fd : buffered_.fd, buffer.data(), begin, end - begin, offset + n - begin, error)) {
            check_unchanged(); // comes after the read, so that a write that changed the bytes is detected
            return buffer.data() + (offset - begin);
        }
        if (direct && error == EINVAL) {
            use_direct_ = false; // O_DIRECT is refused; later reads use the page cache
        }
        count(retries, attempt == 0);
    }
    check_unchanged(); // throws its own error if the file was written to, for example if it became shorter
    throw cannot_read(offset, n, error);
}

Shards open_shards(const Layout & layout, const std::vector<std::string> & paths, bool direct) {
    Shards shards;
    for (size_t i = 0; i < paths.size(); i++) {
        shards.push_back(std::make_unique<Shard>(paths[i], direct, sampled_spans(layout, (int)i)));
    }
    return shards;
}

} // namespace moegguf
