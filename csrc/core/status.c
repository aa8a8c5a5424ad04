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
    char old[sizeof err->message];
    memcpy(old, err->message, sizeof old);
    va_list args;
    va_start(args, format);
    int used = vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    if (used >= 0 && (size_t)used < sizeof err->message) {
        snprintf(err->message + used, sizeof err->message - (size_t)used, ": %s", old);
    }
}
