/* A file system that lacks something, for a process that preloads this: below the directory $REFUSE_BELOW, what
   $REFUSE names fails as other file systems make it fail. Both are read at each call, so a process may change them.

   Paths are compared as they are given: tests use absolute ones. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int refused(const char *what, const char *path) {
  const char *below = getenv("REFUSE_BELOW"), *names = getenv("REFUSE");
  return below && names && strstr(names, what) && !strncmp(path, below, strlen(below));
}

static int refused_fd(const char *what, int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return refused(what, path);
}

int symlink(const char *target, const char *path) { /* exFAT */
  if (refused("symlink", path)) return errno = EPERM, -1;
  return REAL(symlink)(target, path);
}

int fsync(int fd) { /* SMB, 9p */
  struct stat status;
  if (refused_fd("fsync", fd) && !fstat(fd, &status) && S_ISDIR(status.st_mode)) return errno = EINVAL, -1;
  return REAL(fsync)(fd);
}

int flock(int fd, int operation) { /* NFS without lockd */
  if (refused_fd("flock", fd)) return errno = ENOLCK, -1;
  return REAL(flock)(fd, operation);
}

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) { /* FUSE with direct_io */
  if (fd >= 0 && (flags & MAP_SHARED) && refused_fd("mmap", fd)) return errno = ENODEV, MAP_FAILED;
  return REAL(mmap)(address, length, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
  return mmap(address, length, protection, flags, fd, offset);
}

int rename(const char *from, const char *to) { /* buckets that are mounted */
  if (refused("rename", to) && !access(to, F_OK)) return errno = EEXIST, -1;
  return REAL(rename)(from, to);
}

int utimensat(int directory, const char *path, const struct timespec times[2], int flags) { /* FAT */
  struct timespec coarse[2];
  if (!times || !refused("times", path)) return REAL(utimensat)(directory, path, times, flags);
  for (int i = 0; i < 2; i++) coarse[i].tv_sec = times[i].tv_sec / 2 * 2, coarse[i].tv_nsec = 0;
  return REAL(utimensat)(directory, path, coarse, flags);
}
