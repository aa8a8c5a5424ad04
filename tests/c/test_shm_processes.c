/*
 * Ranks as forked processes over the real wire: random rounds, and what survivors see when a peer is killed, stopped,
 * fails or never comes, in each phase. Usage: test_shm_processes [rounds]
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "plain_kernels.h"
#include "shm_rounds.h"
#include "transport/shm.h"

#define CHECK(condition)                                                                      \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            fprintf(stderr, "%s:%d: %s: %s (%s)\n", __FILE__, __LINE__, scenario, #condition, \
                    err.message);                                                             \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

static const char *scenario = "";
static ss_error err;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void new_nonce(char nonce[64])
{
    static int count;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    snprintf(nonce, 64, "test-%d-%d-%lx", (int)getpid(), count++, (long)t.tv_nsec);
}

static int count_entries(const char *folder)
{
    int n = 0;
    DIR *dir = opendir(folder);
    while (readdir(dir) != NULL) {
        n++;
    }
    closedir(dir);
    return n;
}

/* Mappings of shared memory, by their name in the process's map. */
static int count_mappings(void)
{
    int n = 0;
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    while (fgets(line, sizeof line, maps) != NULL) {
        n += strstr(line, "memfd:shardstep") != NULL;
    }
    fclose(maps);
    return n;
}

static ss_transport *open_rank(const char *nonce, int rank, int world, double timeout,
                               ss_transport_callbacks *callbacks)
{
    ss_shm_wire *wire;
    ss_transport *t;
    CHECK(ss_shm_wire_open(nonce, rank, world, timeout, &wire, &err) == SS_OK);
    CHECK(ss_shm_open(wire, &plain_kernels, callbacks, &t, &err) == SS_OK);
    return t;
}

/* Random rounds --------------------------------------------------------------------------------------------------- */

static void rounds_in_process(const char *nonce, int rank, int world, int n)
{
    int fds = count_entries("/proc/self/fd");
    rounds state = {0};
    ss_transport_callbacks callbacks = {.reduced = rounds_reduced, .ctx = &state};
    ss_transport *t = open_rank(nonce, rank, world, 60, &callbacks);
    CHECK(count_entries("/proc/self/fd") <= fds + 2 * (world - 1));
    rounds_all(&state, t, 7, n);
    CHECK(count_entries("/proc/self/fd") == fds);
    CHECK(count_mappings() == 0);
}

static void run_world(int world, int n)
{
    scenario = "rounds";
    char nonce[64];
    pid_t pids[8];
    new_nonce(nonce);
    for (int k = 0; k < world; k++) {
        if ((pids[k] = fork()) == 0) {
            rounds_in_process(nonce, k, world, n);
            exit(0);
        }
    }
    for (int k = 0; k < world; k++) {
        int status;
        waitpid(pids[k], &status, 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

/* Ends of waits. Three ranks; the victim, rank 2, goes so far as the phase says and then meets its fate. ----------- */

typedef enum { IN_REDUCE, IN_SETTLE, IN_COLLECT, IN_RELEASE, IN_EXCHANGE, IN_LONG_EXCHANGE, IN_ADD_CHUNK, DONE } phase;
typedef enum { KILLED, STOPPED, FAILS, LEAVES } fate;

static const char *const phase_names[] = {"reduce", "settle", "collect", "release",
                                          "exchange", "long exchange", "add_chunk", "done"};

#define BUCKETS 3
#define LONG_MESSAGE (48 * 1024 * 1024)

static fate alarm_fate;
static void on_alarm(int signal)
{
    (void)signal;
    kill(getpid(), alarm_fate == KILLED ? SIGKILL : SIGSTOP);
}

/* Goes through a step up to the phase where rank 2 stops; everybody else continues into it. */
static ss_code step_until(ss_transport *t, phase last, int victim)
{
    const ss_transport_ops *ops = t->ops;
    char *message = calloc(4, LONG_MESSAGE); /* mine, and all three */
    ss_code code = SS_OK;
    ss_reduce_state state;
    ss_region *region = NULL;
    for (int b = 0; b < BUCKETS; b++) {
        if (last == IN_REDUCE && victim && b == 1) {
            goto out;
        }
        SS_TRY_GOTO(code, ops->launch(t, b, 1, &err), out);
        if (!victim) {
            SS_TRY_GOTO(code, ops->poll(t, b, &state, &err), out);
        }
    }
    if (last == IN_SETTLE && victim) {
        goto out;
    }
    for (int b = 0; b < BUCKETS; b++) {
        SS_TRY_GOTO(code, ops->reduce(t, b, &err), out);
    }
    SS_TRY_GOTO(code, ops->settle(t, &err), out);
    if (last == IN_EXCHANGE && victim) {
        goto out;
    }
    SS_TRY_GOTO(code, ops->exchange(t, message, 100, message + LONG_MESSAGE, &err), out);
    for (int b = 0; b < BUCKETS && !(last == IN_COLLECT && victim && b == 1); b++) {
        SS_TRY_GOTO(code, ops->publish(t, SS_PLANE_PARAM, b, &err), out);
    }
    for (int b = 0; b < BUCKETS && !(last <= IN_RELEASE && victim); b++) {
        SS_TRY_GOTO(code, ops->collect(t, SS_PLANE_PARAM, b, &err), out);
    }
    if (last <= IN_RELEASE && victim) {
        goto out;
    }
    SS_TRY_GOTO(code, ops->release(t, SS_PLANE_PARAM, &err), out);
    if (last == IN_ADD_CHUNK) {
        if (!victim) {
            ss_bucket_spec spec = {.segment = 128, .param_offset = SIZE_MAX};
            code = ops->add_chunk(t, &spec, 1, 4096, &region, &err);
        }
    } else if (last == IN_LONG_EXCHANGE) {
        if (victim) { /* hit somewhere in the middle */
            signal(SIGALRM, on_alarm);
            ualarm(5000, 0);
        }
        SS_TRY_GOTO(code, ops->exchange(t, message, LONG_MESSAGE, message + LONG_MESSAGE, &err), out);
    }
out:
    free(message);
    return code;
}

static void meet(fate f, ss_transport *t)
{
    switch (f) {
    case KILLED: kill(getpid(), SIGKILL); break;
    case STOPPED: kill(getpid(), SIGSTOP); break;
    case FAILS: t->ops->fail(t, "out of cheese"); break;
    case LEAVES: t->ops->close(t); break;
    }
}

/* In memory common to all processes. */
static struct {
    double fate_time;              /* when the victim met its fate */
    int noticed[3], in_time[3];    /* per survivor: ends of waits, and those within a second */
} *common;

static void survivor_expects(ss_code code, phase p, fate f, double took, int rank)
{
    char place[64];
    static const ss_code codes[] = {SS_ERR_PEER_LOST, SS_ERR_TIMEOUT, SS_ERR_ABORTED, SS_ERR_PEER_LOST};
    if (p == DONE) {
        CHECK(code == SS_OK);
        return;
    }
    CHECK(code == codes[f]);
    CHECK(err.code == code);
    CHECK(took < 5);
    if (f == STOPPED) {
        CHECK(took > 0.3);
    } else {
        common->noticed[rank]++;
        common->in_time[rank] += took < 1;
    }
    if (f == LEAVES) { /* the other survivor may have left in turn by now */
        CHECK(err.rank != rank && strstr(err.message, p == IN_ADD_CHUNK ? "" : "closed its transport") != NULL);
        return;
    }
    CHECK(err.rank == 2);
    CHECK(strstr(err.message, f == STOPPED ? "rank 2" : "rank 2 has") != NULL);
    if (f == FAILS) {
        CHECK(strstr(err.message, "out of cheese") != NULL);
        return;
    }
    snprintf(place, sizeof place, "%s",
             p == IN_REDUCE ? "gradients of bucket 1" : p == IN_SETTLE ? "acknowledgement of the gradients of bucket 0"
             : p == IN_COLLECT ? "segment of the parameters of bucket 1"
             : p == IN_RELEASE ? "acknowledgement of the gathered parameters"
             : p == IN_ADD_CHUNK ? "adding buckets 3 to 3" : "control message");
    CHECK(strstr(err.message, place) != NULL);
    snprintf(place, sizeof place, "rank %d", rank);
    CHECK(strstr(err.message, place) != NULL);
    if (p == IN_REDUCE || p == IN_SETTLE || p == IN_COLLECT) {
        CHECK(err.bucket == (p == IN_SETTLE ? 0 : 1));
    }
}

static void play(phase p, fate f, const char *nonce, int rank)
{
    int fds = count_entries("/proc/self/fd");
    ss_transport *t = open_rank(nonce, rank, 3, 30, NULL);
    ss_bucket_spec specs[BUCKETS];
    for (int b = 0; b < BUCKETS; b++) {
        specs[b] = (ss_bucket_spec){.segment = 1280, .grad_dtype = SS_F32, .param_dtype = SS_F32,
                                    .grad_offset = (size_t)b * 65536, .param_offset = (size_t)b * 65536 + 32768};
    }
    ss_region *region;
    CHECK(t->ops->add_chunk(t, specs, BUCKETS, BUCKETS * 65536, &region, &err) == SS_OK);
    int victim = rank == 2;
    t->timeout = f == STOPPED ? 0.5 : 30;
    if (victim) {
        pid_t child = fork(); /* its copies of the sockets must not hide the death; nor does its end mean ours */
        if (child == 0) {
            ss_reduce_state state;
            CHECK(t->ops->poll(t, 0, &state, &err) == SS_ERR_USAGE);
            t->ops->fail(t, "from a child");
            usleep(300000);
            if (f == LEAVES) {
                t->ops->close(t);
                ss_region_release(region);
            }
            usleep(3000000);
            _exit(0);
        }
        usleep(20000);
    }
    alarm_fate = f;
    double start = now();
    ss_code code = step_until(t, p, victim);
    if (victim) {
        CHECK(code == SS_OK);
        common->fate_time = now();
        meet(f, t);
        usleep(300000);
        _exit(0);
    }
    double end = now();
    survivor_expects(code, p, f, end - (common->fate_time > start ? common->fate_time : start), rank);
    t->ops->close(t);
    memset(region->base, 1, region->bytes);
    ss_region_release(region);
    CHECK(count_entries("/proc/self/fd") == fds);
    CHECK(count_mappings() == 0);
}

static void run_scenario(phase p, fate f)
{
    static char name[64];
    snprintf(name, sizeof name, "rank 2 %s in %s",
             f == KILLED ? "killed" : f == STOPPED ? "stopped" : f == FAILS ? "fails" : "leaves", phase_names[p]);
    scenario = name;
    common->fate_time = 0;
    char nonce[64];
    pid_t pids[3];
    new_nonce(nonce);
    for (int k = 0; k < 3; k++) {
        if ((pids[k] = fork()) == 0) {
            play(p, f, nonce, k);
            exit(0);
        }
    }
    for (int k = 0; k < 3; k++) {
        int status;
        if (k == 2) {
            kill(pids[2], SIGKILL); /* after the survivors have ended */
        }
        waitpid(pids[k], &status, 0);
        CHECK(k == 2 || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
    }
}

/* The handshake ---------------------------------------------------------------------------------------------------- */

static void handshake(void)
{
    scenario = "handshake";
    char nonce[64], line[128], other[128];
    ss_shm_wire *wire;
    int fds = count_entries("/proc/self/fd");
    new_nonce(nonce);

    double start = now();
    CHECK(ss_shm_wire_open(nonce, 0, 2, 0.3, &wire, &err) == SS_ERR_TRANSPORT && err.rank == 1);
    CHECK(ss_shm_wire_open(nonce, 1, 2, 0.3, &wire, &err) == SS_ERR_TRANSPORT && err.rank == 0);
    CHECK(now() - start < 2);
    CHECK(ss_shm_wire_open(nonce, 2, 2, 0.3, &wire, &err) == SS_ERR_USAGE);
    memset(other, 'x', sizeof other - 1);
    other[sizeof other - 1] = '\0';
    CHECK(ss_shm_wire_open(other, 0, 2, 0.3, &wire, &err) == SS_ERR_USAGE);

    /* somebody else's process answers to the name of rank 0 */
    if (geteuid() == 0) {
        int ready[2];
        CHECK(pipe2(ready, 0) == 0);
        pid_t stranger = fork();
        if (stranger == 0) {
            CHECK(setuid(65534) == 0);
            ssize_t n = write(ready[1], "x", 1);
            (void)n;
            ss_code code = ss_shm_wire_open(nonce, 0, 2, 0.5, &wire, &err);
            _exit(code == SS_ERR_TRANSPORT ? 0 : 1);
        }
        char byte;
        CHECK(read(ready[0], &byte, 1) == 1);
        start = now();
        CHECK(ss_shm_wire_open(nonce, 1, 2, 10, &wire, &err) == SS_ERR_TRANSPORT);
        CHECK(now() - start < 1 && strstr(err.message, "user 65534") != NULL);
        int status;
        waitpid(stranger, &status, 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        close(ready[0]);
        close(ready[1]);
    }

    CHECK(ss_shm_identity(line, sizeof line, &err) == SS_OK && ss_shm_identity(other, sizeof other, &err) == SS_OK);
    CHECK(strlen(line) > 30 && strcmp(line, other) == 0);
    CHECK(ss_shm_identity(line, 10, &err) == SS_ERR_USAGE);
    CHECK(count_entries("/proc/self/fd") == fds);
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 300;
    common = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int world = 1; world <= 4; world++) {
        run_world(world, n);
    }
    handshake();
    for (phase p = IN_REDUCE; p <= DONE; p++) {
        run_scenario(p, KILLED);
        if (p != IN_LONG_EXCHANGE && p != DONE) {
            run_scenario(p, LEAVES);
            run_scenario(p, FAILS);
        }
    }
    for (phase p = IN_REDUCE; p <= IN_ADD_CHUNK; p++) {
        run_scenario(p, STOPPED);
    }
    /* All of them, were it not for tests on a machine that is busy with something else. */
    for (int k = 0; k < 2; k++) {
        CHECK(common->noticed[k] > 15 && common->in_time[k] >= common->noticed[k] * 3 / 4);
    }
    puts("ok");
    return 0;
}
