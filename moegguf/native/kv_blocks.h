// kv_blocks.h: states of sequences, read from files straight into a KV cache by two threads, each checked by its
// digest.
//
// It may write the tensors that llama.cpp names for these states. Does not know a state's format.
#pragma once

#include "moegguf.h"

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

struct moegguf_kv_blocks {
    explicit moegguf_kv_blocks(uint64_t seed) : seed_(seed) {}
    ~moegguf_kv_blocks();

    // The state that llama.cpp takes next on this thread: it finds what it asks for behind the address, by the two
    // calls below. Throws Error(IO).
    const void * add(const moegguf_kv_block & block);
    bool read(void * to, const void * at, size_t n);                          // false: `at` is no such address
    bool put(ggml_tensor * tensor, size_t offset, const void * at, size_t n); // the same
    int32_t fill();

    static thread_local moegguf_kv_blocks * current;

  private:
    struct Part { // of a state, for a tensor; it begins at `at` in the file
        ggml_tensor * tensor;
        size_t offset, n;
        uint64_t at;
    };
    struct Block {
        std::string path;
        std::vector<uint8_t> prefix;
        uint8_t digest[16];
        uint64_t begin, end; // of the state in the file
        std::vector<Part> parts = {};
        bool is_right = false;
    };

    bool is_of_last(const void * at, size_t n) const;
    bool fill(const Block & block) const; // false: it is not what its digest says

    void fill_every_other_run(size_t which);
    void end(); // returns after the last block that was added is filled

    // Blocks of a run are one thread's: their cells lie in the same huge pages, which only one should touch first.
    static constexpr size_t run_blocks = 32;

    const uint64_t seed_;
    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<Block> blocks_;
    size_t n_ready_ = 0; // the last one that was added still gets parts
    bool is_complete_ = false;
    std::thread threads_[2];
    std::unique_ptr<uint8_t[]> addresses_; // never touched, so that they take no memory
    size_t n_addresses_ = 0;
    std::vector<uint8_t> window_; // bytes of the last state, and where they begin
    uint64_t window_at_ = 0;
};
