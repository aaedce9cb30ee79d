/* One line for a page of a file map that the kernel cannot bring, for tiers/page_faults.py. The file was cut, its disk is
 * full under a sparse file, or the disk fails: the kernel sends SIGBUS, whose own action ends a process without a word.
 *
 * The handler finds the file by the fault's address in /proc/self/maps, whoever mapped it, and writes one line. Then the
 * signal acts as it would have without us. In a handler only system calls are safe: no memory is allocated, and no library
 * formats the numbers.
 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATIENCE 2000                        /* milliseconds for a reader of a full pipe */

static struct sigaction earlier;             /* what the signal did before */
static const char *start, *advice;
static const int64_t *step;                  /* steps done; -1: none is known */
static volatile int writers, written;
static char path[4200], line[6000];

static size_t text(size_t at, const char *part) {
    while (*part && at < sizeof line - 1) line[at++] = *part++;
    return at;
}

static size_t number(size_t at, uint64_t value) {
    char digits[24];
    int first = sizeof digits - 1;
    digits[first] = 0;
    do digits[--first] = '0' + value % 10; while (value /= 10);
    return text(at, digits + first);
}

/* The file whose map an address lies in, in `path`, and the byte of it; -1: no file. A line of the kernel's is
 * "from-to rights offset device inode path", in hexadecimal. */
static int64_t byte_of_file(uintptr_t address) {
    enum { FROM, TO, RIGHTS, OFFSET, BETWEEN, PATH } field = FROM;
    uint64_t from = 0, to = 0, offset = 0;
    size_t length = 0;
    int64_t byte = -1;
    char page[4096];
    const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    ssize_t count;
    if (fd < 0) return -1;
    while (byte < 0 && (count = read(fd, page, sizeof page)) > 0)
        for (ssize_t i = 0; i < count && byte < 0; i++) {
            const char c = page[i];
            const uint64_t digit = c <= '9' ? c - '0' : c - 'a' + 10;
            if (c == '\n') {
                path[length] = 0;
                if (length && address >= from && address < to) byte = (int64_t)(offset + (address - from));
                from = to = offset = length = 0;
                field = FROM;
            } else if (field == FROM) {
                if (c == '-') field = TO; else from = from << 4 | digit;
            } else if (field == TO) {
                if (c == ' ') field = RIGHTS; else to = to << 4 | digit;
            } else if (field == RIGHTS) {
                if (c == ' ') field = OFFSET;
            } else if (field == OFFSET) {
                if (c == ' ') field = BETWEEN; else offset = offset << 4 | digit;
            } else if (field == BETWEEN && c == '/') {
                path[length++] = c;
                field = PATH;
            } else if (field == PATH && length < sizeof path - 1) {
                path[length++] = c;
            }
        }
    close(fd);
    return byte;
}

static void tell(uintptr_t address) {
    const int64_t byte = byte_of_file(address);
    struct stat state;
    struct pollfd out = {2, POLLOUT, 0};
    if (byte < 0) return;
    size_t at = text(text(0, start), path);
    if (stat(path, &state) == 0) at = text(number(text(at, ", of "), state.st_size), " bytes now");
    at = number(text(at, ": byte "), byte);
    at = text(at, " could not be read or written");
    if (*step >= 0) at = number(text(at, ", at step "), *step);
    at = text(at, advice);
    if (poll(&out, 1, PATIENCE) == 1 && write(2, line, at) < 0) return;
}

static void answer(int signal_number, siginfo_t *info, void *context) {
    (void)context;
    const int error = errno;
    if (__sync_fetch_and_add(&writers, 1) == 0) {
        if (info->si_code > 0) tell((uintptr_t)info->si_addr);  /* not one that a program sent */
        sigaction(signal_number, &earlier, NULL);
        __sync_synchronize();
        written = 1;
    } else
        while (!written) usleep(1000);       /* other threads of a kernel meet the end of the file as well */
    errno = error;
    raise(signal_number);                    /* pending until the handler returns */
}

/* Have such faults named from now on. The texts and the number stay the caller's, for as long as the process lives. */
void blockwalk_name_faults(const char *beginning, const char *end, const int64_t *steps_done) {
    struct sigaction ours;
    start = beginning;
    advice = end;
    step = steps_done;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = answer;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, &earlier);
}
