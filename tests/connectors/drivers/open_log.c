/* Preloaded into a driver: writes the flags and path of every open to the file that
 * KVFS_OPEN_LOG names, so that a test can see whether a connector really used O_DIRECT. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int (*openat_t)(int, const char *, int, ...);

static int log_fd = -1;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("KVFS_OPEN_LOG");
    openat_t real = (openat_t)dlsym(RTLD_NEXT, "openat");
    if (path)
        log_fd = real(AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int logged(int at, const char *path, int flags, mode_t mode)
{
    static openat_t real;
    if (!real)
        real = (openat_t)dlsym(RTLD_NEXT, "openat");
    if (log_fd >= 0 && path)
        dprintf(log_fd, "%o %s\n", (unsigned)flags, path);
    return real(at, path, flags, mode);
}

#define MODE_OF(flags)                                          \
    mode_t mode = 0;                                            \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                    \
        va_list arguments;                                      \
        va_start(arguments, flags);                             \
        mode = va_arg(arguments, mode_t);                       \
        va_end(arguments);                                      \
    }

int open(const char *path, int flags, ...)
{
    MODE_OF(flags)
    return logged(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    MODE_OF(flags)
    return logged(AT_FDCWD, path, flags, mode);
}

int openat(int at, const char *path, int flags, ...)
{
    MODE_OF(flags)
    return logged(at, path, flags, mode);
}

int openat64(int at, const char *path, int flags, ...)
{
    MODE_OF(flags)
    return logged(at, path, flags, mode);
}

/* Inside of libc fopen opens without asking anybody. */
static FILE *logged_stream(const char *path, const char *mode)
{
    static FILE *(*real)(const char *, const char *);
    if (!real)
        real = (FILE *(*)(const char *, const char *))dlsym(RTLD_NEXT, "fopen");
    if (log_fd >= 0 && path)
        dprintf(log_fd, "%o %s\n", (unsigned)(mode[0] == 'r' ? O_RDONLY : O_WRONLY), path);
    return real(path, mode);
}

FILE *fopen(const char *path, const char *mode)
{
    return logged_stream(path, mode);
}

FILE *fopen64(const char *path, const char *mode)
{
    return logged_stream(path, mode);
}

int __open_2(const char *path, int flags)
{
    return logged(AT_FDCWD, path, flags, 0);
}

int __open64_2(const char *path, int flags)
{
    return logged(AT_FDCWD, path, flags, 0);
}
