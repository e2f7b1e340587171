// SPDX-License-Identifier: Apache-2.0
/*
 * A stand-in for libnvidia-ml.so.1 that answers, as nvml.h documents, what a
 * state file says at the moment of the call.  It knows the calling convention
 * of NVML and nothing else: it keeps no books, holds no lock, writes no state
 * and gives a call no memory beyond what is on its stack.  What a call changes
 * it asks simgpu.py to change, by the socket beside the state.  simgpu.py keeps the
 * books and replaces the state file by rename, so that every call sees one
 * whole state, and two calls may see two.
 *
 * The state is /run/simgpu/state, or what SIMGPU_STATE names.  It is a text
 * file of "word value" lines, each ended by a newline:
 *
 *   simgpu 1                     the format; must be the first line
 *   driver 550.54.15             what nvmlSystemGetDriverVersion says
 *   nvml 12.550.54.15            what nvmlSystemGetNVMLVersion says
 *   cuda 12040                   what nvmlSystemGetCudaDriverVersion says
 *   nodes 1                      nvmlInit opens the device nodes, as NVML does
 *   error FUNCTION TARGET CODE   this call fails with that nvmlReturn_t
 *   delay FUNCTION TARGET MS     this call takes so long
 *   hang  FUNCTION TARGET [PATH] this call never returns; a signal can end it,
 *                                unless PATH is given, which is read instead
 *                                (on a dead FUSE mount that is state D)
 *   crash FUNCTION TARGET        this call is a segmentation fault
 *
 *   gpu 0                        starts a GPU; 0 is its slot, its name in TARGET
 *   missing 0                    1: no longer counted nor found
 *   lost no                      "calls": calls on it say GPU_IS_LOST;
 *                                "handle": getting its handle does so too
 *   uuid GPU-…      name NVIDIA H100 80GB HBM3      pci 00000000:1B:00.0
 *   minor 0         arch 9       bus_type 2         addressing 0
 *   cc 9.0          util 0       mem_util 0
 *   memory 1                     0: both memory calls are NOT_SUPPORTED
 *   memory_v2 1                  0: only the v2 call is NOT_SUPPORTED
 *   total N   reserved N   used N   free N          bytes, "used" as v2 counts
 *   mig none                     "none": cannot; "off": could; "on": is
 *   mig_next same                the same "off" or "on" for after a reset
 *   compute_mode 0               nvmlComputeMode_t
 *   persistence 1                persistence mode is on
 *   ecc 1                        0: it is off, and no call knows of errors
 *   remap_pending 0   remap_failed 0   retired_pending 0   uncorrected 0
 *                                rows are remapped from Ampere on (arch 7),
 *                                before that pages are retired
 *   proc KIND PID BYTES          KIND is compute, graphics or mps, BYTES a
 *                                number or "na"
 *   instance 0                   starts MIG instance 0 of the GPU above, with
 *   gi 1  ci 0  slices 1         uuid, name, total, reserved, used, free, proc
 *                                lines of its own
 *
 * The order of the gpu lines is the order of NVML's indices.  FUNCTION is a
 * glob over exported names ("nvmlInit" stands for all its versions), TARGET a
 * glob over "SLOT" for a GPU, "SLOT.INSTANCE" for a MIG instance and "-" for
 * calls that ask about no device.  Unknown words are ignored.
 *
 * Where a file called "calls" lies beside the state, each call adds one line
 * to it when it enters: CLOCK_BOOTTIME in ns, pid, function, target.
 *
 * Compiled with -DNO_V3, -DNO_V2 or -DNO_MEMORY_V2 it lacks those symbols, as
 * older drivers do; with -DSTATE_PATH='"PATH"' it is a decoy, which believes
 * another state.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4,
    ALREADY_INITIALIZED = 5, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, INSUFFICIENT_POWER = 8,
    DRIVER_NOT_LOADED = 9, TIMEOUT = 10, IRQ_ISSUE = 11, LIBRARY_NOT_FOUND = 12, FUNCTION_NOT_FOUND = 13,
    CORRUPTED_INFOROM = 14, GPU_IS_LOST = 15, RESET_REQUIRED = 16, OPERATING_SYSTEM = 17,
    LIB_RM_VERSION_MISMATCH = 18, IN_USE = 19, MEMORY = 20, NO_DATA = 21, VGPU_ECC_NOT_SUPPORTED = 22,
    INSUFFICIENT_RESOURCES = 23, FREQ_NOT_SUPPORTED = 24, ARGUMENT_VERSION_MISMATCH = 25, DEPRECATED = 26,
    NOT_READY = 27, GPU_NOT_FOUND = 28, INVALID_STATE = 29, RESET_TYPE_NOT_SUPPORTED = 30, UNKNOWN = 999,
};

#ifndef STATE_PATH
#define STATE_PATH "/run/simgpu/state"
#endif
#define MAX_GPUS 16
#define MAX_INSTANCES 7
#define NO_INSTANCE 0xFFFFFFFFu
#define NOT_AVAILABLE 0xFFFFFFFFFFFFFFFFull
#define MEMORY_V2_VERSION (sizeof(struct memory_v2) | 2u << 24)
#define ADDRESSING_V1_VERSION (sizeof(struct addressing) | 1u << 24)

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct process_v1 { unsigned pid; unsigned long long bytes; };
struct process_v2 { unsigned pid; unsigned long long bytes; unsigned gi, ci; };
struct utilization { unsigned gpu, memory; };
struct addressing { unsigned version, value; };
struct attributes {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gi_slices, ci_slices;
    unsigned long long memory_mib;
};
struct pci { char legacy[16]; unsigned domain, bus, device, ids, subsystem; char id[32]; };

_Static_assert(sizeof(struct memory_v2) == 40, "nvmlMemory_v2_t");
_Static_assert(sizeof(struct process_v2) == 24, "nvmlProcessInfo_v2_t");
_Static_assert(sizeof(struct pci) == 68, "nvmlPciInfo_t");

/* A handle is the address of one of these bytes: [slot][0] is the GPU, [slot][1 + n] its instance n. */
static char handles[MAX_GPUS][1 + MAX_INSTANCES];

struct state { const char *text; size_t size; };

/* A place in the state: the line read last, and which GPU and instance it belongs to (-1: none). */
struct cursor {
    const char *at, *end;
    char word[32], value[256];
    int slot, instance;
};

struct device {
    int slot, instance, index, found, missing;
    char uuid[96], name[96], pci[32], lost[16], mig[16], mig_next[16];
    unsigned compute_mode, persistence, ecc, remap_pending, remap_failed, retired_pending;
    unsigned long long uncorrected;
    unsigned minor, arch, bus_type, addressing, cc_major, cc_minor, util, mem_util, memory, memory_v2;
    unsigned gi, ci, slices, instances;
    unsigned long long total, reserved, used, free;
};

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static int init_count;
static pid_t init_pid;
static int node_fds[1 + MAX_GPUS], node_count;

/* ---- the state file ---- */

static const char *state_path(void)
{
    const char *path = getenv("SIMGPU_STATE");
    return path && *path ? path : STATE_PATH;
}

static int open_state(struct state *state)
{
    struct stat st;
    int fd = open(state_path(), O_RDONLY | O_CLOEXEC);

    state->text = NULL;
    state->size = 0;
    if (fd < 0)
        return DRIVER_NOT_LOADED;
    if (fstat(fd, &st) == 0 && st.st_size > 9) {
        /* The file is only ever replaced, never written again, so the mapping stays as it was when opened. */
        void *map = mmap(NULL, st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map != MAP_FAILED) {
            state->text = map;
            state->size = st.st_size;
        }
    }
    close(fd);
    if (state->text && state->text[state->size - 1] == '\n' && memcmp(state->text, "simgpu 1\n", 9) == 0)
        return SUCCESS;
    if (state->text)
        munmap((void *)state->text, state->size);
    state->text = NULL;
    return UNKNOWN;
}

static void close_state(struct state *state)
{
    if (state->text)
        munmap((void *)state->text, state->size);
    state->text = NULL;
}

static struct cursor start_of(const struct state *state)
{
    return (struct cursor){ .at = state->text, .end = state->text + state->size, .slot = -1, .instance = -1 };
}

static void copy(char *into, size_t size, const char *from, size_t length)
{
    if (length >= size)
        length = size - 1;
    memcpy(into, from, length);
    into[length] = 0;
}

/* Reads one line into word and value; over-long ones are cut, since they can only be somebody's mistake. */
static int next_line(struct cursor *c)
{
    while (c->at < c->end) {
        const char *eol = memchr(c->at, '\n', c->end - c->at);
        const char *space = memchr(c->at, ' ', eol - c->at);
        const char *word_end = space ? space : eol, *value = space ? space + 1 : eol;

        copy(c->word, sizeof c->word, c->at, word_end - c->at);
        copy(c->value, sizeof c->value, value, eol - value);
        c->at = eol + 1;
        if (strcmp(c->word, "gpu") == 0) {
            c->slot = atoi(c->value);
            c->instance = -1;
        } else if (strcmp(c->word, "instance") == 0) {
            c->instance = atoi(c->value);
        }
        if (c->slot < MAX_GPUS && c->instance < MAX_INSTANCES)
            return 1;
    }
    return 0;
}

static void global_word(const struct state *state, const char *word, char *into, size_t size)
{
    struct cursor c = start_of(state);

    *into = 0;
    while (next_line(&c) && c.slot < 0)
        if (strcmp(c.word, word) == 0)
            copy(into, size, c.value, strlen(c.value));
}

static void text(char *into, size_t size, const char *value) { copy(into, size, value, strlen(value)); }
static unsigned number(const char *value) { return (unsigned)strtoul(value, NULL, 10); }
static unsigned long long big(const char *value) { return strtoull(value, NULL, 10); }

static void take(struct device *d, const struct cursor *c)
{
    const char *w = c->word, *v = c->value;

    if (!strcmp(w, "uuid")) text(d->uuid, sizeof d->uuid, v);
    else if (!strcmp(w, "name")) text(d->name, sizeof d->name, v);
    else if (!strcmp(w, "pci")) text(d->pci, sizeof d->pci, v);
    else if (!strcmp(w, "lost")) text(d->lost, sizeof d->lost, v);
    else if (!strcmp(w, "mig")) text(d->mig, sizeof d->mig, v);
    else if (!strcmp(w, "mig_next")) text(d->mig_next, sizeof d->mig_next, v);
    else if (!strcmp(w, "compute_mode")) d->compute_mode = number(v);
    else if (!strcmp(w, "persistence")) d->persistence = number(v);
    else if (!strcmp(w, "ecc")) d->ecc = number(v);
    else if (!strcmp(w, "remap_pending")) d->remap_pending = number(v);
    else if (!strcmp(w, "remap_failed")) d->remap_failed = number(v);
    else if (!strcmp(w, "retired_pending")) d->retired_pending = number(v);
    else if (!strcmp(w, "uncorrected")) d->uncorrected = big(v);
    else if (!strcmp(w, "missing")) d->missing = number(v);
    else if (!strcmp(w, "minor")) d->minor = number(v);
    else if (!strcmp(w, "arch")) d->arch = number(v);
    else if (!strcmp(w, "bus_type")) d->bus_type = number(v);
    else if (!strcmp(w, "addressing")) d->addressing = number(v);
    else if (!strcmp(w, "cc")) sscanf(v, "%u.%u", &d->cc_major, &d->cc_minor);
    else if (!strcmp(w, "util")) d->util = number(v);
    else if (!strcmp(w, "mem_util")) d->mem_util = number(v);
    else if (!strcmp(w, "memory")) d->memory = number(v);
    else if (!strcmp(w, "memory_v2")) d->memory_v2 = number(v);
    else if (!strcmp(w, "total")) d->total = big(v);
    else if (!strcmp(w, "reserved")) d->reserved = big(v);
    else if (!strcmp(w, "used")) d->used = big(v);
    else if (!strcmp(w, "free")) d->free = big(v);
    else if (!strcmp(w, "gi")) d->gi = number(v);
    else if (!strcmp(w, "ci")) d->ci = number(v);
    else if (!strcmp(w, "slices")) d->slices = number(v);
}

/* Fills a device from the state; what an instance does not say for itself (lost, minor) is its GPU's. */
static int read_device(const struct state *state, int slot, int instance, struct device *d)
{
    struct cursor c = start_of(state);
    int index = -1, this_gpu = 0, instance_seen = 0;

    memset(d, 0, sizeof *d);
    d->slot = slot;
    d->instance = instance;
    d->memory = d->memory_v2 = d->persistence = d->ecc = 1;
    d->bus_type = 2;
    d->gi = d->ci = NO_INSTANCE;
    while (next_line(&c)) {
        if (c.slot < 0)
            continue;
        if (!strcmp(c.word, "gpu"))
            index++, this_gpu = c.slot == slot;
        else if (!strcmp(c.word, "missing") && c.instance < 0 && number(c.value))
            index--;
        if (!this_gpu)
            continue;
        d->found = 1;
        d->index = index;
        if (!strcmp(c.word, "instance")) {
            d->instances++;
            if (c.instance == instance)
                instance_seen = 1;
        }
        if (c.instance < 0 || c.instance == instance)
            take(d, &c);
    }
    d->found = d->found && !d->missing && (instance < 0 || (instance_seen && !strcmp(d->mig, "on")));
    return d->found;
}

/* The slots of the GPUs that are there, in NVML's order. */
static int present(const struct state *state, int slots[MAX_GPUS])
{
    struct cursor c = start_of(state);
    int n = 0;

    while (next_line(&c)) {
        if (!strcmp(c.word, "gpu") && c.slot >= 0 && n < MAX_GPUS)
            slots[n++] = c.slot;
        else if (!strcmp(c.word, "missing") && c.slot >= 0 && c.instance < 0 && number(c.value) && n)
            n--;
    }
    return n;
}

static void *handle_of(int slot, int instance) { return &handles[slot][1 + instance]; }

static int where_is(const void *handle, int *slot, int *instance)
{
    const char *at = handle, *first = &handles[0][0];

    if (at < first || at >= first + sizeof handles)
        return 0;
    *slot = (at - first) / (1 + MAX_INSTANCES);
    *instance = (at - first) % (1 + MAX_INSTANCES) - 1;
    return 1;
}

/* ---- what happens to a call before it is answered ---- */

static void log_call(const char *function, const char *target)
{
    char path[512], line[256];
    const char *state = state_path(), *slash = strrchr(state, '/');
    struct timespec now;
    int fd, n;

    snprintf(path, sizeof path, "%.*scalls", slash ? (int)(slash - state + 1) : 0, state);
    fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (fd < 0)
        return;
    clock_gettime(CLOCK_BOOTTIME, &now);
    n = snprintf(line, sizeof line, "%lld%09ld %d %s %s\n", (long long)now.tv_sec, now.tv_nsec, getpid(),
                 function, target);
    /* One write of one short line: appends of several processes do not mix. */
    if (write(fd, line, n) != n)
        errno = 0;
    close(fd);
}

static int same_function(const char *pattern, const char *function)
{
    if (!strcmp(pattern, "nvmlInit") && !strncmp(function, "nvmlInit", 8))
        return 1;
    return fnmatch(pattern, function, 0) == 0;
}

static void hang(const char *path)
{
    char byte;
    int fd;

    if (path && (fd = open(path, O_RDONLY | O_CLOEXEC)) >= 0) {
        while (read(fd, &byte, 1) < 0 && errno == EINTR) {
        }
        close(fd);
    }
    /* A caller's signal handler may return here; the driver would not care, and neither do we. */
    for (;;)
        pause();
}

/* Applies delays, hangs, crashes and errors, in the order of their lines; the first error is the answer. */
static int suffer(const struct state *state, const char *function, const char *target)
{
    struct cursor c = start_of(state);
    char pattern[96], where[32], rest[128];

    while (next_line(&c) && c.slot < 0) {
        *rest = 0;
        if (strcmp(c.word, "error") && strcmp(c.word, "delay")
            && strcmp(c.word, "hang") && strcmp(c.word, "crash"))
            continue;
        if (sscanf(c.value, "%95s %31s %127s", pattern, where, rest) < 2)
            continue;
        if (!same_function(pattern, function) || fnmatch(where, target, 0))
            continue;
        if (!strcmp(c.word, "hang"))
            hang(*rest ? rest : NULL);
        if (!strcmp(c.word, "crash")) {
            signal(SIGSEGV, SIG_DFL);
            raise(SIGSEGV);
        }
        if (!strcmp(c.word, "error"))
            return number(rest);
        unsigned ms = number(rest);
        struct timespec left = { ms / 1000, ms % 1000 * 1000000L };
        while (nanosleep(&left, &left) < 0 && errno == EINTR) {
        }
    }
    return SUCCESS;
}

static int initialised(void)
{
    int result;

    pthread_mutex_lock(&init_lock);
    /* NVML does not survive a fork: a child that goes on using its parent's handle gets no sense from it. */
    result = !init_count ? UNINITIALIZED : init_pid != getpid() ? UNKNOWN : SUCCESS;
    pthread_mutex_unlock(&init_lock);
    return result;
}

/* Opens the state for a call about no device.  Whatever it answers, leave_system() must follow. */
static int enter_system(struct state *state, const char *function, int needs_init)
{
    int rc;

    state->text = NULL;
    log_call(function, "-");
    if (needs_init && (rc = initialised()))
        return rc;
    rc = open_state(state);
    if (rc)
        return needs_init ? UNKNOWN : rc;
    return suffer(state, function, "-");
}

/* The same for a call about a device, which is filled in.  close_state() must follow. */
static int enter(struct state *state, const char *function, const void *handle, struct device *d)
{
    char target[16] = "?";
    int rc, slot = 0, instance = -1, known = where_is(handle, &slot, &instance);

    state->text = NULL;
    if (known && instance < 0)
        snprintf(target, sizeof target, "%d", slot);
    else if (known)
        snprintf(target, sizeof target, "%d.%d", slot, instance);
    log_call(function, target);
    if ((rc = initialised()))
        return rc;
    if (!known)
        return INVALID_ARGUMENT;
    if (open_state(state))
        return UNKNOWN;
    if ((rc = suffer(state, function, target)))
        return rc;
    if (!read_device(state, slot, instance, d))
        return instance < 0 ? GPU_IS_LOST : NOT_FOUND;
    return *d->lost && strcmp(d->lost, "no") ? GPU_IS_LOST : SUCCESS;
}

static int put(char *into, unsigned length, const char *value)
{
    if (!into)
        return INVALID_ARGUMENT;
    if (strlen(value) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(into, value);
    return SUCCESS;
}

/* ---- start and end ---- */

static void open_node(const char *path)
{
    int fd = open(path, O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);

    if (fd >= 0)
        node_fds[node_count++] = fd;
}

/* The driver's library keeps every GPU's node open while it is initialised: a monitor is a process with all
 * nodes open and no memory, and tools that judge by open nodes must live with it. */
static void open_nodes(const struct state *state)
{
    char wanted[8], path[32];
    int slots[MAX_GPUS], n = present(state, slots);
    struct device d;

    global_word(state, "nodes", wanted, sizeof wanted);
    if (!number(wanted))
        return;
    open_node("/dev/nvidiactl");
    for (int i = 0; i < n; i++) {
        if (!read_device(state, slots[i], -1, &d))
            continue;
        snprintf(path, sizeof path, "/dev/nvidia%u", d.minor);
        open_node(path);
    }
}

static int init(const char *function)
{
    struct state state;
    int rc = enter_system(&state, function, 0);

    if (rc == SUCCESS) {
        pthread_mutex_lock(&init_lock);
        if (init_count && init_pid != getpid()) {
            rc = UNKNOWN;
        } else if (init_count++ == 0) {
            init_pid = getpid();
            open_nodes(&state);
        }
        pthread_mutex_unlock(&init_lock);
    }
    close_state(&state);
    return rc;
}

API int nvmlInit(void) { return init(__func__); }
API int nvmlInit_v2(void) { return init(__func__); }
API int nvmlInitWithFlags(unsigned flags) { (void)flags; return init(__func__); }

API int nvmlShutdown(void)
{
    struct state state;
    int rc = enter_system(&state, "nvmlShutdown", 1);

    if (rc == SUCCESS) {
        pthread_mutex_lock(&init_lock);
        if (--init_count == 0)
            while (node_count)
                close(node_fds[--node_count]);
        pthread_mutex_unlock(&init_lock);
    }
    close_state(&state);
    return rc;
}

API const char *nvmlErrorString(int result)
{
    switch (result) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case ALREADY_INITIALIZED: return "Already Initialized";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case INSUFFICIENT_POWER: return "Insufficient External Power";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case IRQ_ISSUE: return "Interrupt Request Issue";
    case LIBRARY_NOT_FOUND: return "NVML Shared Library Not Found";
    case FUNCTION_NOT_FOUND: return "Function Not Found";
    case CORRUPTED_INFOROM: return "Corrupted infoROM";
    case GPU_IS_LOST: return "GPU is lost";
    case RESET_REQUIRED: return "GPU requires restart";
    case OPERATING_SYSTEM: return "The operating system has blocked the request.";
    case LIB_RM_VERSION_MISMATCH: return "RM has detected an NVML/RM version mismatch.";
    case IN_USE: return "In use by another client";
    case MEMORY: return "Insufficient Memory";
    case NO_DATA: return "No data";
    case VGPU_ECC_NOT_SUPPORTED: return "VGPU operation is not available when ECC is enabled";
    case INSUFFICIENT_RESOURCES: return "Insufficient Resources";
    case FREQ_NOT_SUPPORTED: return "Frequency Not Supported";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    case DEPRECATED: return "Deprecated";
    case NOT_READY: return "Not Ready";
    case GPU_NOT_FOUND: return "GPU Not Found";
    case INVALID_STATE: return "Invalid State";
    case RESET_TYPE_NOT_SUPPORTED: return "Reset Type Not Supported";
    default: return "Unknown Error";
    }
}

/* ---- the system ---- */

static int system_text(const char *function, int needs_init, const char *word, char *into, unsigned length)
{
    struct state state;
    char value[80];
    int rc = enter_system(&state, function, needs_init);

    if (rc == SUCCESS) {
        global_word(&state, word, value, sizeof value);
        rc = put(into, length, value);
    }
    close_state(&state);
    return rc;
}

API int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    return system_text("nvmlSystemGetDriverVersion", 1, "driver", version, length);
}

/* This one, and CUDA's version below, nvml.h allows before nvmlInit. */
API int nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    return system_text("nvmlSystemGetNVMLVersion", 0, "nvml", version, length);
}

static int cuda_version(const char *function, int *version)
{
    struct state state;
    char value[32];
    int rc = enter_system(&state, function, 0);

    if (rc == SUCCESS && !version)
        rc = INVALID_ARGUMENT;
    if (rc == SUCCESS) {
        global_word(&state, "cuda", value, sizeof value);
        *version = number(value);
    }
    close_state(&state);
    return rc;
}

API int nvmlSystemGetCudaDriverVersion(int *version) { return cuda_version(__func__, version); }
API int nvmlSystemGetCudaDriverVersion_v2(int *version) { return cuda_version(__func__, version); }

/* ---- finding devices ---- */

static int count(const char *function, unsigned *n)
{
    struct state state;
    int slots[MAX_GPUS], rc = enter_system(&state, function, 1);

    if (rc == SUCCESS && !n)
        rc = INVALID_ARGUMENT;
    if (rc == SUCCESS)
        *n = present(&state, slots);
    close_state(&state);
    return rc;
}

API int nvmlDeviceGetCount(unsigned *n) { return count(__func__, n); }
API int nvmlDeviceGetCount_v2(unsigned *n) { return count(__func__, n); }

/* Gives out a handle, unless the GPU is so lost that even this fails, or a fault is set for it by name. */
static int give(const struct state *state, const char *function, int slot, int instance, void **handle)
{
    struct device d;
    char target[16];
    int rc;

    snprintf(target, sizeof target, instance < 0 ? "%d" : "%d.%d", slot, instance);
    if ((rc = suffer(state, function, target)))
        return rc;
    if (!read_device(state, slot, instance, &d))
        return NOT_FOUND;
    if (!strcmp(d.lost, "handle"))
        return GPU_IS_LOST;
    *handle = handle_of(slot, instance);
    return SUCCESS;
}

static int by_index(const char *function, unsigned index, void **handle)
{
    struct state state;
    int slots[MAX_GPUS], rc = enter_system(&state, function, 1);

    if (rc == SUCCESS)
        rc = !handle || index >= (unsigned)present(&state, slots) ? INVALID_ARGUMENT
           : give(&state, function, slots[index], -1, handle);
    close_state(&state);
    return rc;
}

API int nvmlDeviceGetHandleByIndex(unsigned index, void **out) { return by_index(__func__, index, out); }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { return by_index(__func__, index, out); }

API int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    const char *function = "nvmlDeviceGetHandleByUUID";
    struct state state;
    struct cursor c;
    int rc = enter_system(&state, function, 1);

    if (rc == SUCCESS && (!uuid || !handle))
        rc = INVALID_ARGUMENT;
    if (rc == SUCCESS) {
        rc = NOT_FOUND;
        c = start_of(&state);
        while (rc == NOT_FOUND && next_line(&c))
            if (c.slot >= 0 && !strcmp(c.word, "uuid") && !strcmp(c.value, uuid))
                rc = give(&state, function, c.slot, c.instance, handle);
    }
    close_state(&state);
    return rc;
}

/* Takes "domain:bus:device.function", the domain and the function being optional, in hexadecimal. */
static int parse_pci(const char *from, unsigned at[3])
{
    unsigned function;
    int end = 0;

    if (sscanf(from, "%x:%x:%x%n.%x%n", &at[0], &at[1], &at[2], &end, &function, &end) >= 3)
        return from[end] == 0;
    at[0] = 0;
    return sscanf(from, "%x:%x%n.%x%n", &at[1], &at[2], &end, &function, &end) >= 2 && from[end] == 0;
}

static int by_pci(const char *function, const char *id, void **handle)
{
    struct state state;
    struct device d;
    unsigned wanted[3], has[3]; /* domain, bus, device: 12 bytes */
    int slots[MAX_GPUS], rc = enter_system(&state, function, 1);

    if (rc == SUCCESS && (!id || !handle || !parse_pci(id, wanted)))
        rc = INVALID_ARGUMENT;
    if (rc == SUCCESS) {
        int n = present(&state, slots);
        rc = NOT_FOUND;
        for (int i = 0; i < n && rc == NOT_FOUND; i++)
            if (read_device(&state, slots[i], -1, &d) && parse_pci(d.pci, has) && !memcmp(has, wanted, 12))
                rc = give(&state, function, slots[i], -1, handle);
    }
    close_state(&state);
    return rc;
}

API int nvmlDeviceGetHandleByPciBusId(const char *id, void **out) { return by_pci(__func__, id, out); }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **out) { return by_pci(__func__, id, out); }

/* ---- one device ---- */

/* The frame of every call about one device: the block sees the device as d and sets rc. */
#define ASK(handle, ...)                                         \
    struct state state;                                          \
    struct device d;                                             \
    int rc = enter(&state, __func__, handle, &d);                \
    if (rc == SUCCESS) __VA_ARGS__                               \
    close_state(&state);                                         \
    return rc

/* A plain number, which MIG instances do not have. */
#define GIVE_UNSIGNED(function, expression)                      \
    API int function(void *device, unsigned *out)                \
    {                                                            \
        ASK(device, {                                            \
            if (!out)                                            \
                rc = INVALID_ARGUMENT;                           \
            else if (d.instance >= 0)                            \
                rc = NOT_SUPPORTED;                              \
            else                                                 \
                *out = (expression);                             \
        });                                                      \
    }

/* What a data-centre card in this state does not say.  Callers must cope. */
#define UNSUPPORTED(function)                                    \
    API int function(void *device)                               \
    {                                                            \
        ASK(device, { rc = NOT_SUPPORTED; });                    \
    }

API int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length)
{
    ASK(device, { rc = put(uuid, length, d.uuid); });
}

API int nvmlDeviceGetName(void *device, char *name, unsigned length)
{
    ASK(device, { rc = put(name, length, d.name); });
}

API int nvmlDeviceGetIndex(void *device, unsigned *index)
{
    ASK(device, {
        if (!index)
            rc = INVALID_ARGUMENT;
        else
            *index = d.instance < 0 ? d.index : d.instance;
    });
}

GIVE_UNSIGNED(nvmlDeviceGetMinorNumber, d.minor)
GIVE_UNSIGNED(nvmlDeviceGetPersistenceMode, d.persistence)
GIVE_UNSIGNED(nvmlDeviceGetComputeMode, d.compute_mode)
GIVE_UNSIGNED(nvmlDeviceGetBusType, d.bus_type)
GIVE_UNSIGNED(nvmlDeviceGetArchitecture, d.arch)
GIVE_UNSIGNED(nvmlDeviceGetPowerUsage, 70000)
GIVE_UNSIGNED(nvmlDeviceGetEnforcedPowerLimit, 700000)
UNSUPPORTED(nvmlDeviceGetFanSpeed)
UNSUPPORTED(nvmlDeviceGetSerial)
UNSUPPORTED(nvmlDeviceGetNumaNodeId)
UNSUPPORTED(nvmlDeviceGetAccountingMode)

API int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *degrees)
{
    ASK(device, {
        if (sensor != 0 || !degrees)
            rc = INVALID_ARGUMENT;
        else
            *degrees = 35;
    });
}

API int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor)
{
    ASK(device, {
        if (!major || !minor) {
            rc = INVALID_ARGUMENT;
        } else {
            *major = d.cc_major;
            *minor = d.cc_minor;
        }
    });
}

API int nvmlDeviceGetAddressingMode(void *device, struct addressing *mode)
{
    ASK(device, {
        if (!mode)
            rc = INVALID_ARGUMENT;
        else if (mode->version != ADDRESSING_V1_VERSION)
            rc = ARGUMENT_VERSION_MISMATCH;
        else
            mode->value = d.addressing;
    });
}

static int pci_info(const struct device *d, struct pci *pci)
{
    unsigned at[3];

    if (!pci)
        return INVALID_ARGUMENT;
    if (!parse_pci(d->pci, at))
        return UNKNOWN;
    memset(pci, 0, sizeof *pci);
    pci->domain = at[0];
    pci->bus = at[1];
    pci->device = at[2];
    pci->ids = 0x233010DE;
    pci->subsystem = 0x16C110DE;
    snprintf(pci->legacy, sizeof pci->legacy, "%04X:%02X:%02X.0", at[0] & 0xFFFF, at[1] & 0xFF, at[2] & 0xFF);
    snprintf(pci->id, sizeof pci->id, "%08X:%02X:%02X.0", at[0], at[1] & 0xFF, at[2] & 0xFF);
    return SUCCESS;
}

API int nvmlDeviceGetPciInfo_v2(void *device, struct pci *pci) { ASK(device, { rc = pci_info(&d, pci); }); }
API int nvmlDeviceGetPciInfo_v3(void *device, struct pci *pci) { ASK(device, { rc = pci_info(&d, pci); }); }

static int utilization(const struct device *d, struct utilization *out)
{
    if (!out)
        return INVALID_ARGUMENT;
    /* nvml.h: with MIG on, utilisation can be asked of nobody. */
    if (!strcmp(d->mig, "on"))
        return NOT_SUPPORTED;
    out->gpu = d->util;
    out->memory = d->mem_util;
    return SUCCESS;
}

API int nvmlDeviceGetUtilizationRates(void *device, struct utilization *out)
{
    ASK(device, { rc = utilization(&d, out); });
}

static int engine(const struct device *d, unsigned *percent, unsigned *period)
{
    if (!percent || !period)
        return INVALID_ARGUMENT;
    if (!strcmp(d->mig, "on"))
        return NOT_SUPPORTED;
    *percent = 0;
    *period = 167000;
    return SUCCESS;
}

API int nvmlDeviceGetEncoderUtilization(void *device, unsigned *percent, unsigned *period)
{
    ASK(device, { rc = engine(&d, percent, period); });
}

API int nvmlDeviceGetDecoderUtilization(void *device, unsigned *percent, unsigned *period)
{
    ASK(device, { rc = engine(&d, percent, period); });
}

/* Has the bookkeeper change something of this GPU, as whom it sees the caller. */
static int change(const struct device *d, const char *key, int value)
{
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    const char *state = state_path(), *slash = strrchr(state, '/');
    char line[128], reply[512];
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), n, got = 0;

    n = snprintf(line, sizeof line, "{\"op\": \"set_gpu\", \"gpu\": %d, \"%s\": %d}\n", d->slot, key, value);
    snprintf(at.sun_path, sizeof at.sun_path, "%.*scontrol", slash ? (int)(slash - state + 1) : 0, state);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&at, sizeof at) == 0 && send(fd, line, n, MSG_NOSIGNAL) == n)
        while (got < (int)sizeof reply - 1 && (n = recv(fd, reply + got, sizeof reply - 1 - got, 0)) > 0)
            if (reply[(got += n) - 1] == '\n')
                break;
    if (fd >= 0)
        close(fd);
    reply[got] = 0;
    return strstr(reply, "\"ok\": true") ? SUCCESS : UNKNOWN;
}

API int nvmlDeviceSetPersistenceMode(void *device, unsigned mode)
{
    ASK(device, {
        if (mode > 1)
            rc = INVALID_ARGUMENT;
        else if (d.instance >= 0)
            rc = NOT_SUPPORTED;
        else
            rc = change(&d, "persistence", mode);
    });
}

/* ---- errors of the memory ---- */

/* The first architecture that remaps rows, Ampere; those before it retire pages. */
#define REMAPS 7

API int nvmlDeviceGetEccMode(void *device, unsigned *current, unsigned *pending)
{
    ASK(device, {
        if (!current || !pending)
            rc = INVALID_ARGUMENT;
        else if (d.instance >= 0)
            rc = NOT_SUPPORTED;
        else
            *current = *pending = d.ecc;
    });
}

/* nvml.h: on a GPU with MIG instances, this is not supported. */
API int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                                  unsigned *failed)
{
    ASK(device, {
        if (!corrected || !uncorrected || !pending || !failed) {
            rc = INVALID_ARGUMENT;
        } else if (d.instance >= 0 || d.instances || !d.ecc || d.arch < REMAPS) {
            rc = NOT_SUPPORTED;
        } else {
            *corrected = 0;
            *uncorrected = d.remap_pending + d.remap_failed;
            *pending = d.remap_pending;
            *failed = d.remap_failed;
        }
    });
}

API int nvmlDeviceGetRetiredPagesPendingStatus(void *device, unsigned *pending)
{
    ASK(device, {
        if (!pending)
            rc = INVALID_ARGUMENT;
        else if (d.instance >= 0 || !d.ecc || d.arch >= REMAPS)
            rc = NOT_SUPPORTED;
        else
            *pending = d.retired_pending;
    });
}

/* Only uncorrected ones of since the last reset are kept; there are none of any other kind. */
API int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *count)
{
    ASK(device, {
        if (!count || type < 0 || type > 1 || counter < 0 || counter > 1)
            rc = INVALID_ARGUMENT;
        else if (d.instance >= 0 || !d.ecc)
            rc = NOT_SUPPORTED;
        else
            *count = type == 1 && counter == 0 ? d.uncorrected : 0;
    });
}

/* ---- memory ---- */

/* With NVML_MPS_DEVICE_ENUMERATION=1 the real library answers as an MPS client would see the GPU.  What
 * exactly that is, is not published; here the figures are an idle GPU's, the worst that could be believed. */
static int idle_view(void)
{
    const char *value = getenv("NVML_MPS_DEVICE_ENUMERATION");
    return value && !strcmp(value, "1");
}

API int nvmlDeviceGetMemoryInfo(void *device, struct memory *out)
{
    ASK(device, {
        if (!out)
            rc = INVALID_ARGUMENT;
        else if (!d.memory)
            rc = NOT_SUPPORTED;
        else if (idle_view())
            *out = (struct memory){ .total = d.total, .free = d.total };
        else
            /* The first version knows no reserved memory: it counts it as used. */
            *out = (struct memory){ .total = d.total, .free = d.free, .used = d.used + d.reserved };
    });
}

#ifndef NO_MEMORY_V2
API int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *out)
{
    ASK(device, {
        if (!out) {
            rc = INVALID_ARGUMENT;
        } else if (out->version != MEMORY_V2_VERSION) {
            rc = ARGUMENT_VERSION_MISMATCH;
        } else if (!d.memory || !d.memory_v2) {
            rc = NOT_SUPPORTED;
        } else {
            out->total = d.total;
            out->reserved = idle_view() ? 0 : d.reserved;
            out->free = idle_view() ? d.total : d.free;
            out->used = idle_view() ? 0 : d.used;
        }
    });
}
#endif

/* ---- processes ---- */

/* Hands every record of that kind on this device to out, if it has room, and says how many there are.  A GPU
 * lists its instances' processes too. */
static unsigned each_process(const struct state *state, const struct device *d, const char *kind,
                             struct process_v2 *out, unsigned room)
{
    struct cursor c = start_of(state);
    char is[16], bytes[32];
    unsigned n = 0, pid, gi = NO_INSTANCE, ci = NO_INSTANCE;

    if (idle_view())
        return 0;
    while (next_line(&c)) {
        if (c.slot != d->slot)
            continue;
        if (!strcmp(c.word, "gi"))
            gi = number(c.value);
        else if (!strcmp(c.word, "ci"))
            ci = number(c.value);
        if (strcmp(c.word, "proc") || (d->instance >= 0 && c.instance != d->instance))
            continue;
        if (sscanf(c.value, "%15s %u %31s", is, &pid, bytes) != 3 || strcmp(is, kind))
            continue;
        if (n < room) {
            out[n] = (struct process_v2){ .pid = pid, .gi = NO_INSTANCE, .ci = NO_INSTANCE };
            out[n].bytes = strcmp(bytes, "na") ? big(bytes) : NOT_AVAILABLE;
            if (c.instance >= 0)
                out[n].gi = gi, out[n].ci = ci;
        }
        n++;
    }
    return n;
}

/* nvml.h: *count is the room on entry and the number on return; too little room, or none, is
 * INSUFFICIENT_SIZE with the number needed, and only asking with no room may come without an array. */
static int processes(const struct state *state, const struct device *d, const char *kind, unsigned *count,
                     void *out, int version)
{
    unsigned room, n;

    if (!count || (*count && !out))
        return INVALID_ARGUMENT;
    room = *count;
    n = each_process(state, d, kind, NULL, 0);
    *count = n;
    if (n > room)
        return INSUFFICIENT_SIZE;
    if (version >= 2) {
        each_process(state, d, kind, out, n);
    } else {
        /* The first record has no instances and is shorter, so it cannot be filled by the same loop. */
        struct process_v2 all[n ? n : 1];
        each_process(state, d, kind, all, n);
        for (unsigned i = 0; i < n; i++)
            ((struct process_v1 *)out)[i] = (struct process_v1){ .pid = all[i].pid, .bytes = all[i].bytes };
    }
    return SUCCESS;
}

#define PROCESSES(function, kind, version)                       \
    API int function(void *device, unsigned *count, void *infos) \
    {                                                            \
        ASK(device, { rc = processes(&state, &d, kind, count, infos, version); }); \
    }

PROCESSES(nvmlDeviceGetComputeRunningProcesses, "compute", 1)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, "graphics", 1)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, "mps", 1)
#ifndef NO_V2
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, "compute", 2)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics", 2)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps", 2)
#endif
#ifndef NO_V3
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "compute", 3)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics", 3)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps", 3)
#endif

/* ---- MIG ---- */

API int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending)
{
    ASK(device, {
        if (!current || !pending)
            rc = INVALID_ARGUMENT;
        else if (d.instance >= 0 || !*d.mig || !strcmp(d.mig, "none"))
            rc = NOT_SUPPORTED;
        else {
            *current = !strcmp(d.mig, "on");
            *pending = *d.mig_next && strcmp(d.mig_next, "same") ? !strcmp(d.mig_next, "on") : *current;
        }
    });
}

API int nvmlDeviceIsMigDeviceHandle(void *device, unsigned *is)
{
    ASK(device, {
        if (!is)
            rc = INVALID_ARGUMENT;
        else
            *is = d.instance >= 0;
    });
}

API int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count)
{
    ASK(device, {
        if (!count)
            rc = INVALID_ARGUMENT;
        else
            *count = !strcmp(d.mig, "on") ? MAX_INSTANCES : 0;
    });
}

static int instance_handle(const struct state *state, const char *function, const struct device *d,
                           unsigned index, void **out)
{
    if (!out || index >= MAX_INSTANCES || d->instance >= 0)
        return INVALID_ARGUMENT;
    return strcmp(d->mig, "on") ? NOT_SUPPORTED : give(state, function, d->slot, index, out);
}

API int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **out)
{
    ASK(device, { rc = instance_handle(&state, __func__, &d, index, out); });
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *device, void **out)
{
    ASK(device, {
        if (!out || d.instance < 0)
            rc = INVALID_ARGUMENT;
        else
            *out = handle_of(d.slot, -1);
    });
}

#define GIVE_OF_INSTANCE(function, expression)                   \
    API int function(void *device, unsigned *out)                \
    {                                                            \
        ASK(device, {                                            \
            if (!out)                                            \
                rc = INVALID_ARGUMENT;                           \
            else if (d.instance < 0)                             \
                rc = NOT_SUPPORTED;                              \
            else                                                 \
                *out = (expression);                             \
        });                                                      \
    }

GIVE_OF_INSTANCE(nvmlDeviceGetGpuInstanceId, d.gi)
GIVE_OF_INSTANCE(nvmlDeviceGetComputeInstanceId, d.ci)

API int nvmlDeviceGetAttributes_v2(void *device, struct attributes *out)
{
    ASK(device, {
        if (!out)
            rc = INVALID_ARGUMENT;
        else if (d.instance < 0)
            rc = NOT_SUPPORTED;
        else
            *out = (struct attributes){ .multiprocessors = 16 * d.slices, .gi_slices = d.slices,
                                        .ci_slices = d.slices, .memory_mib = d.total >> 20 };
    });
}
