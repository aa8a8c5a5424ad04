/* Waiting for peers: how long, and what can end it other than their arrival. */
#define _GNU_SOURCE
#include "transport/shm_private.h"

#include <stdio.h>
#include <string.h>

/* Deaths and interrupts are looked for this often; a sleep never lasts longer. */
#define CHECK_SECONDS 0.1

int ss_shm_arrived(const ss_shm *t, const ss_shm_await *what, int rank)
{
    if (rank == t->base.rank) {
        return 1;
    }
    ss_word *word = NULL;
    switch (what->phase) {
    case SS_AWAIT_GRADIENTS: word = &ss_shm_words(t, what->bucket, rank)->ready; break;
    case SS_AWAIT_READERS: word = &ss_shm_words(t, what->bucket, rank)->read; break;
    case SS_AWAIT_SEGMENT: word = &ss_shm_words(t, what->bucket, rank)->updated[what->plane]; break;
    case SS_AWAIT_COLLECTED: word = &t->controls[rank]->collected[what->plane]; break;
    case SS_AWAIT_MESSAGE: word = &t->controls[rank]->exchanged; break;
    }
    return ss_reached(atomic_load(word), what->target);
}

int ss_shm_all_arrived(const ss_shm *t, const ss_shm_await *what)
{
    for (int k = 0; k < t->base.world; k++) {
        if (!ss_shm_arrived(t, what, k)) {
            return 0;
        }
    }
    return 1;
}

static int satisfied(const ss_shm *t, const ss_shm_await *what, int rank)
{
    return rank == SS_SHM_ALL ? ss_shm_all_arrived(t, what) : ss_shm_arrived(t, what, rank);
}

void ss_shm_ring(ss_shm *t)
{
    for (int k = 0; k < t->base.world; k++) {
        if (k != t->base.rank) {
            ss_bell_ring(t->bells[k]);
        }
    }
}

/* "gradients of bucket 3": fits after "its" and after "the". */
static void describe(const ss_shm_await *what, char text[96])
{
    const char *plane = what->plane == SS_PLANE_GRAD ? "gradients" : "parameters";
    switch (what->phase) {
    case SS_AWAIT_GRADIENTS: snprintf(text, 96, "gradients of bucket %d", what->bucket); break;
    case SS_AWAIT_READERS: snprintf(text, 96, "acknowledgement of the gradients of bucket %d", what->bucket); break;
    case SS_AWAIT_SEGMENT: snprintf(text, 96, "segment of the %s of bucket %d", plane, what->bucket); break;
    case SS_AWAIT_COLLECTED: snprintf(text, 96, "acknowledgement of the gathered %s", plane); break;
    case SS_AWAIT_MESSAGE: snprintf(text, 96, "control message"); break;
    }
}

static ss_code peer_failed(const ss_shm *t, int rank, int bucket, ss_error *err)
{
    return ss_fail_at(err, SS_ERR_ABORTED, rank, bucket, "rank %d has given up: %s", rank,
                      t->controls[rank]->message);
}

/* Is one of those that I wait for gone, in the way that `closed` says? What it posted before counts, hence the second
   look at its word. One that failed before it died is left to its own message. */
static ss_code check_gone(const ss_shm *t, const ss_shm_await *what, int closed, ss_error *err)
{
    for (int k = 0; k < t->base.world; k++) {
        if (ss_shm_arrived(t, what, k)) {
            continue;
        }
        if (!closed && t->wire->ops->alive(t->wire, k)) {
            continue;
        }
        uint32_t state = atomic_load(&t->controls[k]->state);
        if (state != (closed ? SS_SHM_CLOSED : SS_SHM_OPEN) || ss_shm_arrived(t, what, k)) {
            continue;
        }
        char text[96];
        describe(what, text);
        return ss_fail_at(err, SS_ERR_PEER_LOST, k, what->bucket, "rank %d has %s while rank %d waited for its %s", k,
                          closed ? "closed its transport" : "died", t->base.rank, text);
    }
    return SS_OK;
}

static int failed_peer(const ss_shm *t)
{
    for (int k = 0; k < t->base.world; k++) {
        if (atomic_load(&t->controls[k]->state) == SS_SHM_FAILED) {
            return k;
        }
    }
    return -1;
}

/* The first bucket that I have launched and this rank has not, or -1. */
static int not_launched_by(const ss_shm *t, int rank)
{
    for (int i = t->unreduced; i < t->n_launched; i++) {
        ss_shm_await gradients = {SS_AWAIT_GRADIENTS, SS_PLANE_GRAD, t->launched[i], 2 * t->buckets[t->launched[i]].round};
        if (!ss_shm_arrived(t, &gradients, rank)) {
            return t->launched[i];
        }
    }
    return -1;
}

static ss_code timed_out(const ss_shm *t, const ss_shm_await *what, ss_error *err)
{
    char text[96], ranks[256];
    int first = -1, count = 0;
    size_t used = 0;
    ranks[0] = '\0';
    for (int k = 0; k < t->base.world; k++) {
        if (ss_shm_arrived(t, what, k)) {
            continue;
        }
        first = count++ == 0 ? k : first;
        int n = snprintf(ranks + used, sizeof ranks - used, "%s%d", used > 0 ? ", " : "", k);
        if (n > 0 && used + (size_t)n + 8 < sizeof ranks) {
            used += (size_t)n;
        } else {
            snprintf(ranks + used, sizeof ranks - used, ", ...");
        }
    }
    if (count == 0) {
        return SS_OK; /* they came at the last moment */
    }
    describe(what, text);
    int missing = what->phase == SS_AWAIT_MESSAGE ? not_launched_by(t, first) : -1;
    char also[64] = "";
    if (missing >= 0) { /* where that rank has stopped, as far as its peers can see */
        snprintf(also, sizeof also, "; rank %d has not sent bucket %d", first, missing);
    }
    return ss_fail_at(err, SS_ERR_TIMEOUT, first, missing >= 0 ? missing : what->bucket,
                      "rank %d has waited %g s in vain for the %s from rank%s %s%s", t->base.rank, t->base.timeout, text,
                      count == 1 ? "" : "s", ranks, also);
}

static int interrupted(const ss_shm *t)
{
    const ss_transport_callbacks *callbacks = &t->base.callbacks;
    return callbacks->interrupted != NULL && callbacks->interrupted(callbacks->ctx) != 0;
}

/* Ends the wait if it has become pointless, or too long. The cause is named rather than its consequences: a rank that
   died rather than one that gave up because of it, and either rather than one that then closed its transport. So that
   no cause is missed, consequences are looked at first. */
static ss_code check(ss_shm *t, const ss_shm_await *what, int rank, double deadline, ss_error *err)
{
    double now = ss_now();
    int due = now >= t->next_check, late = now >= deadline;
    ss_error closed = {.code = SS_OK};
    if (due || late) {
        check_gone(t, what, 1, &closed);
    }
    int failed = failed_peer(t);
    if (due || late || failed >= 0) {
        SS_TRY(check_gone(t, what, 0, err));
    }
    if (failed >= 0) {
        return satisfied(t, what, rank) ? SS_OK : peer_failed(t, failed, what->bucket, err);
    }
    if (closed.code != SS_OK) {
        return ss_fail_at(err, closed.code, closed.rank, closed.bucket, "%s", closed.message);
    }
    if (due) {
        t->next_check = now + CHECK_SECONDS;
        if (interrupted(t)) {
            return ss_fail_at(err, SS_ERR_INTERRUPTED, -1, what->bucket, "interrupted while waiting for peers");
        }
    }
    if (late && !satisfied(t, what, rank)) {
        return timed_out(t, what, err);
    }
    return SS_OK;
}

ss_code ss_shm_while_sharing(void *transport, ss_error *err)
{
    ss_shm *t = transport;
    int failed = failed_peer(t);
    if (failed >= 0) {
        return peer_failed(t, failed, -1, err);
    }
    return interrupted(t) ? ss_fail(err, SS_ERR_INTERRUPTED, "interrupted while waiting for peers") : SS_OK;
}

static int can_progress(const ss_shm *t)
{
    for (int i = t->unreduced; i < t->n_launched; i++) {
        const ss_shm_bucket *b = &t->buckets[t->launched[i]];
        ss_shm_await gradients = {SS_AWAIT_GRADIENTS, SS_PLANE_GRAD, t->launched[i], 2 * b->round};
        if (!b->reduced && ss_shm_all_arrived(t, &gradients)) {
            return 1;
        }
    }
    return 0;
}

/* Returns when something may have changed. */
static void doze(ss_shm *t, const ss_shm_await *what, int rank, double deadline)
{
    for (int i = 0; i < t->spins; i++) {
        if (satisfied(t, what, rank)) {
            return;
        }
        ss_pause();
    }
    ss_shm_bell *bell = t->bells[t->base.rank];
    uint32_t rings = atomic_load(&bell->rings);
    atomic_store(&bell->sleeping, 1);
    if (!satisfied(t, what, rank) && !can_progress(t) && failed_peer(t) < 0) {
        double wake = t->next_check < deadline ? t->next_check : deadline, seconds = wake - ss_now();
        if (seconds > 0) {
            ss_futex_wait(&bell->rings, rings, seconds < CHECK_SECONDS ? seconds : CHECK_SECONDS);
        }
    }
    atomic_store(&bell->sleeping, 0);
}

ss_code ss_shm_wait(ss_shm *t, const ss_shm_await *what, int rank, double deadline, ss_error *err)
{
    while (!satisfied(t, what, rank)) {
        if (ss_shm_progress(t)) {
            continue;
        }
        SS_TRY(check(t, what, rank, deadline, err));
        double start = ss_now();
        doze(t, what, rank, deadline);
        t->base.traffic.wait_seconds += ss_now() - start;
    }
    return SS_OK;
}

ss_code ss_shm_usable(const ss_shm *t, ss_error *err)
{
    if (!ss_origin_is_here(&t->origin)) {
        return ss_fail(err, SS_ERR_USAGE, "this process is a forked child of rank %d and cannot use its transport",
                       t->base.rank);
    }
    if (atomic_load(&t->controls[t->base.rank]->state) == SS_SHM_FAILED) {
        return peer_failed(t, t->base.rank, -1, err);
    }
    return SS_OK;
}
