/* A mount without shared file maps, as FUSE with direct_io is: below NO_SHARED_MAPS the kernel's answer to one is ENODEV. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef void *map_call(void *, size_t, int, int, int, off_t);

static int refused(int flags, int fd) {
    const char *folder = getenv("NO_SHARED_MAPS");
    char link[64], path[PATH_MAX];
    if (!folder || fd < 0 || (flags & MAP_TYPE) != MAP_SHARED) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return length > 0 && !strncmp(path, folder, strlen(folder));
}

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    if (refused(flags, fd)) {
        errno = ENODEV;
        return MAP_FAILED;
    }
    return ((map_call *)dlsym(RTLD_NEXT, "mmap"))(address, length, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    return mmap(address, length, protection, flags, fd, offset);
}
