// readers.h: threads that read matrices of experts from the files into slots, each with a read buffer of its own.
//
// They ask a link what comes next and tell it when that has ended. They write into slots which that has given them, and
// change no other state of a store.
#pragma once

#include "files.h"
#include "link.h"
#include "tier.h"

namespace moegguf {

class Readers {
  public:
    // Opens the files and starts the threads. Throws Error.
    Readers(const Layout & layout, Shared & shared, const Tiers & tiers, Link & link, int n);
    ~Readers(); // stops the store
    Readers(const Readers &) = delete;
    Readers & operator=(const Readers &) = delete;

    // Any thread.
    bool direct() const { return files_.direct(); }
    uint64_t buffer_bytes() const { return buffers_.size() * buffers_[0]->size(); }

  private:
    void run(const ReadBuffer & buffer);
    void read(const Job & job, const ReadBuffer & buffer, ReadStats & stats, uint64_t & upload_ns);

    const Layout & layout_;
    Shared & shared_;
    const Tiers & tiers_;
    Link & link_;
    const Files files_;
    std::vector<std::unique_ptr<ReadBuffer>> buffers_; // one per reader
    std::mutex upload_;                                // devices that are not host memory take one upload at a time
    std::vector<std::thread> threads_;
};

} // namespace moegguf
