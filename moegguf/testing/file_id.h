// file_id.h: identifies a file by its device and inode. A descriptor and all paths of one file have equal ids.
#pragma once

#include <sys/stat.h>

namespace moegguf {

struct FileId {
    dev_t device = 0;
    ino_t inode = 0; // 0: there is no file, or stat() failed

    bool operator==(const FileId & other) const { return device == other.device && inode == other.inode; }
};

inline FileId file_id(const struct stat & status) { return {status.st_dev, status.st_ino}; }

inline FileId file_id(int fd) {
    struct stat status;
    return ::fstat(fd, &status) == 0 ? file_id(status) : FileId();
}

inline FileId file_id(const char * path) {
    struct stat status;
    return ::stat(path, &status) == 0 ? file_id(status) : FileId();
}

} // namespace moegguf
