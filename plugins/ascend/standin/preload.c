/* What the stand-in for an NPU's driver changes around MemFabric. It is preloaded, so these calls come here first. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>

/* --- The file with the driver's version --------------------------------------------------------------------------
 *
 * The library looks for it at a fixed place, where only root could put it. Here, that path leads to the folder in
 * ASCEND_HOME_PATH, where `driver.py` has put the file.
 */
char *realpath(const char *path, char *resolved)
{
    char *(*next)(const char *, char *) = (char *(*)(const char *, char *))dlsym(RTLD_NEXT, "realpath");
    const char *home = getenv("ASCEND_HOME_PATH");
    char ours[4096];
    if (home && strcmp(path, "/usr/local/Ascend/driver/version.info") == 0) {
        snprintf(ours, sizeof ours, "%s/version.info", home);
        path = ours;
    }
    return next(path, resolved);
}

/* The name under which it is called by what was compiled with checks of sizes. */
char *__realpath_chk(const char *path, char *resolved, size_t size)
{
    (void)size;
    return realpath(path, resolved);
}

/* --- The library's pauses ----------------------------------------------------------------------------------------
 *
 * Its threads sleep for up to two seconds between two looks at something, and it waits for each of them when it
 * ends: seconds for every link that is closed, and tests close hundreds. So a pause of the library is at most this
 * long. Those of everybody else are left alone.
 */
enum { LONGEST_MS = 20 };
static const struct timespec LONGEST = {.tv_nsec = LONGEST_MS * 1000000};

/* It takes no lock, unlike dladdr: the loader may hold its own while threads of the library start. */
static int is_the_librarys(void *caller)
{
    struct dl_find_object found;
    return _dl_find_object(caller, &found) == 0 && strstr(found.dlfo_link_map->l_name, "/memfabric_hybrid/lib/");
}

int nanosleep(const struct timespec *wanted, struct timespec *left)
{
    int shorter = wanted->tv_sec > 0 || wanted->tv_nsec > LONGEST.tv_nsec;
    if (shorter && is_the_librarys(__builtin_return_address(0)))
        wanted = &LONGEST;
    errno = clock_nanosleep(CLOCK_REALTIME, 0, wanted, left);
    return errno ? -1 : 0;
}

int epoll_wait(int epoll, struct epoll_event *events, int most, int milliseconds)
{
    if (milliseconds > LONGEST_MS && is_the_librarys(__builtin_return_address(0)))
        milliseconds = LONGEST_MS;
    return epoll_pwait(epoll, events, most, milliseconds, NULL);
}

int poll(struct pollfd *polled, nfds_t count, int milliseconds)
{
    if (milliseconds > LONGEST_MS && is_the_librarys(__builtin_return_address(0)))
        milliseconds = LONGEST_MS;
    struct timespec pause = {.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000L};
    return ppoll(polled, count, milliseconds < 0 ? NULL : &pause, NULL);
}
