// fault.h: the one shim between the store and the operations that can fail, so that tests can make the Nth fail.
// Knows nothing of the store.
#pragma once

#include "moegguf.h"

#include <sys/stat.h>
#include <sys/types.h>

namespace moegguf {

// True when this operation is the one that must fail; errno is set.
bool fault(moegguf_fault_kind kind);

int sys_open(const char * path, int flags);
int sys_fstat(int fd, struct stat * st);
ssize_t sys_pread(int fd, void * buffer, size_t n, off_t offset);
void * sys_aligned_alloc(size_t alignment, size_t n);

} // namespace moegguf
