#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static ss_code fill(ss_error *err, ss_code code, int rank, int bucket, const char *format, va_list args)
{
    if (err != NULL) {
        err->code = code;
        err->rank = rank;
        err->bucket = bucket;
        vsnprintf(err->message, sizeof err->message, format, args);
    }
    return code;
}

ss_code ss_fail(ss_error *err, ss_code code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fill(err, code, -1, -1, format, args);
    va_end(args);
    return code;
}

ss_code ss_fail_at(ss_error *err, ss_code code, int rank, int bucket, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fill(err, code, rank, bucket, format, args);
    va_end(args);
    return code;
}

void ss_error_prefix(ss_error *err, const char *format, ...)
{
    if (err == NULL) {
        return;
    }
    char whole[2 * sizeof err->message]; /* cut to size only at the end */
    va_list args;
    va_start(args, format);
    int used = vsnprintf(whole, sizeof err->message, format, args);
    va_end(args);
    size_t at = used < 0 ? 0 : (size_t)used < sizeof err->message ? (size_t)used : sizeof err->message - 1;
    snprintf(whole + at, sizeof whole - at, ": %s", err->message);
    memcpy(err->message, whole, sizeof err->message - 1);
    err->message[sizeof err->message - 1] = '\0';
}
