/*
 * Result codes and the error record that travels with them.
 *
 * Every function of the C core that can fail returns an ss_code and takes an `ss_error *err` as its last argument.
 * On success `err` is untouched. On failure it holds a sentence for the user; callers add context by prefixing it.
 * Nothing in the core prints, exits or aborts.
 */
#ifndef SHARDSTEP_CORE_STATUS_H
#define SHARDSTEP_CORE_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    SS_OK = 0,
    SS_ERR_USAGE,       /* the caller misused the API */
    SS_ERR_MISMATCH,    /* ranks disagree in a way that has no right answer */
    SS_ERR_PEER_LOST,   /* a peer process is gone */
    SS_ERR_TIMEOUT,     /* a peer did not arrive in time */
    SS_ERR_TRANSPORT,   /* the transport itself failed (socket, mapping, process group) */
    SS_ERR_ABORTED,     /* a peer aborted the window; the window is dropped and the engine is usable */
    SS_ERR_NO_MEMORY,
    SS_ERR_INTERRUPTED, /* a signal handler asked to stop waiting (Ctrl-C) */
    SS_ERR_FRAMEWORK    /* the framework's callback failed and has set its own exception */
} ss_code;

typedef struct {
    ss_code code;
    int rank;   /* the peer concerned, or -1 */
    int bucket; /* the bucket concerned, or -1 */
    char message[1024];
} ss_error;

/* Fills *err (err may be NULL) and returns `code`, so that `return ss_fail(...)` reads well. */
ss_code ss_fail(ss_error *err, ss_code code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* As ss_fail, naming the peer and the bucket concerned (-1 for none). */
ss_code ss_fail_at(ss_error *err, ss_code code, int rank, int bucket, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Puts "context: " before the message that *err already holds. */
void ss_error_prefix(ss_error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Returns from the enclosing function when `call` fails. */
#define SS_TRY(call)                    \
    do {                                \
        ss_code ss_try_code_ = (call);  \
        if (ss_try_code_ != SS_OK) {    \
            return ss_try_code_;        \
        }                               \
    } while (0)

/* Jumps to `label` when `call` fails, leaving the code in `result`. */
#define SS_TRY_GOTO(result, call, label) \
    do {                                 \
        (result) = (call);               \
        if ((result) != SS_OK) {         \
            goto label;                  \
        }                                \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
