// api.h: helpers for the functions of the C ABI. They convert exceptions to status codes, and refuse NULL pointers and
// calls in a child process. The functions of the C ABI may use every part of a store.
#pragma once

#include "store.h"

#include <new>

namespace moegguf {

inline thread_local std::string last_error;

template <typename F>
int guarded(F && body) {
    try {
        body();
        last_error.clear();
        return MOEGGUF_OK;
    } catch (const Error & e) {
        last_error = e.what();
        return e.status;
    } catch (const std::bad_alloc &) {
        last_error = "out of memory";
        return MOEGGUF_MEMORY;
    } catch (const std::exception & e) {
        last_error = e.what();
        return MOEGGUF_INVALID;
    }
}

template <typename T>
T & given(T * pointer) {
    if (!pointer) { throw Error(MOEGGUF_INVALID, "a required pointer is null"); }
    return *pointer;
}

template <typename F>
int on(moegguf_store * store, F && body) {
    return guarded([&] {
        if (!store) { throw Error(MOEGGUF_INVALID, "no store"); }
        if (store->store.shared.forked()) { throw Error(MOEGGUF_FORKED, forked_text); }
        body(store->store);
    });
}

} // namespace moegguf
