/*
 * The words by which ranks tell each other, through shared memory, how far they are.
 *
 * An epoch word counts up and is never reset. It is written by one rank only, its owner, and the words of one owner
 * share cache lines with no other rank's. Epochs are compared by signed difference, so they may wrap.
 *
 * Sleeping. A rank that must wait sleeps on its own doorbell, the only memory that peers write. The sleeper reads
 * `rings`, sets `sleeping`, looks at the words once more, and only then sleeps, while `rings` is unchanged; a poster
 * writes its word first and looks at `sleeping` after. All of it is sequentially consistent, so one of the two sees the
 * other. A post costs one locked store and one load per peer while nobody sleeps.
 */
#ifndef SHARDSTEP_TRANSPORT_SHM_WORDS_H
#define SHARDSTEP_TRANSPORT_SHM_WORDS_H

#include <linux/futex.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SS_SHM_LINE 64
#define SS_SHM_PIECE (64 * 1024) /* bytes of one exchange message; longer ones are split */
#define SS_SHM_MESSAGE 512       /* bytes of a failure's message, with its final zero */

typedef _Atomic uint32_t ss_word;

/* Written by its owner and by peers. */
typedef struct {
    alignas(SS_SHM_LINE) ss_word rings;
    ss_word sleeping;
} ss_shm_bell;

enum { SS_SHM_OPEN = 0, SS_SHM_FAILED = 1, SS_SHM_CLOSED = 2 };

/* Written by its owner only. */
typedef struct {
    alignas(SS_SHM_LINE) ss_word state; /* SS_SHM_OPEN, SS_SHM_FAILED or SS_SHM_CLOSED */
    ss_word exchanged;                  /* pieces that I have posted */
    ss_word collected[2];               /* per plane: releases that I have entered, having collected all I want */
    alignas(SS_SHM_LINE) char message[SS_SHM_MESSAGE]; /* why I failed */
    /* Piece n lies in slot n % 2. By the time it is written every peer has posted piece n - 1, hence read n - 2. */
    struct {
        alignas(SS_SHM_LINE) uint64_t bytes; /* length of the whole message, for comparison */
        alignas(SS_SHM_LINE) char data[SS_SHM_PIECE];
    } slot[2];
} ss_shm_control;

/* Written by its owner only; one per bucket. */
typedef struct {
    ss_word ready;      /* 2 * round + contributes: my gradient is final for this round */
    ss_word read;       /* round: I have read all that I need of this bucket from peers */
    ss_word updated[2]; /* per plane: publications of my own segment */
} ss_shm_bucket_words;

static inline int ss_reached(uint32_t epoch, uint32_t target) { return (int32_t)(epoch - target) >= 0; }

static inline double ss_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void ss_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Sleeps while *word is `seen`, for `seconds` at most; may return early. Works across processes (not "private"). */
static inline void ss_futex_wait(ss_word *word, uint32_t seen, double seconds)
{
    struct timespec t = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

/* Wakes the bell's owner if it sleeps. To be called after the word it waits for was written. */
static inline void ss_bell_ring(ss_shm_bell *bell)
{
    if (atomic_load(&bell->sleeping) != 0 && atomic_exchange(&bell->sleeping, 0) != 0) {
        atomic_fetch_add(&bell->rings, 1);
        syscall(SYS_futex, &bell->rings, FUTEX_WAKE, 1, NULL, NULL, 0);
    }
}

#endif
