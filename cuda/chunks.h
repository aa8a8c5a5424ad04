/*
 * How many ranges of elements become blocks of one launch.
 *
 * A range is walked in packs of 8 elements, one thread each: whole packs by accesses of 16 bytes, the pieces of a pack at its
 * ends (or everything, where the pointers do not allow it) element by element. A chunk is what one block does of one range.
 */
#ifndef SHARDSTEP_CUDA_CHUNKS_H
#define SHARDSTEP_CUDA_CHUNKS_H

#include <string.h>

#include "grid.h"
#include "kernels/numeric.h"

#define SS_PACK 8
#define SS_CHUNK 16384 /* elements */
#define SS_CHUNK_PACKS (SS_CHUNK / SS_PACK)

/* Element types: what is in memory, what is computed with, and the way between them. */
struct f32 {
    static const bool present = true;
    typedef float raw;
    typedef float wide;
    static SS_ON_DEVICE wide widen(raw x) { return x; }
    static SS_ON_DEVICE raw narrow(wide x) { return x; }
};
struct f64 {
    static const bool present = true;
    typedef double raw;
    typedef double wide;
    static SS_ON_DEVICE wide widen(raw x) { return x; }
    static SS_ON_DEVICE raw narrow(wide x) { return x; }
};
struct bf16 {
    static const bool present = true;
    typedef uint16_t raw;
    typedef float wide;
    static SS_ON_DEVICE wide widen(raw x) { return ss_bf16_to_f32(x); }
    static SS_ON_DEVICE raw narrow(wide x) { return ss_f32_to_bf16(x); }
};
struct f16 {
    static const bool present = true;
    typedef uint16_t raw;
    typedef float wide;
    static SS_ON_DEVICE wide widen(raw x) { return ss_f16_to_f32(x); }
    static SS_ON_DEVICE raw narrow(wide x) { return ss_f32_to_f16(x); }
};
/* No such array: the master is the parameter itself, or an operation has no source. */
struct none {
    static const bool present = false;
    typedef uint16_t raw;
};

/* n elements, the first of which is element `shift` of pack 0. */
struct ss_span {
    int64_t n;
    int32_t shift;
    int32_t vector; /* whole packs begin at multiples of 16 bytes in all arrays */
};

static inline int64_t ss_span_chunks(const ss_span &span)
{
    return span.n == 0 ? 0 : (span.shift + span.n + SS_CHUNK - 1) / SS_CHUNK;
}

/* Do packs that begin at element -shift of this array begin at multiples of 16 bytes? */
static inline bool ss_fits(const void *array, size_t element, int shift)
{
    return array == NULL || ((uintptr_t)array - (uintptr_t)shift * element) % 16 == 0;
}

/* The part of one pack that lies in the span, as elements [begin + from, begin + to) of the arrays. */
struct ss_pack {
    int64_t begin;
    int from, to;
    bool vector;
};

static SS_ON_DEVICE ss_pack ss_pack_of(const ss_span &span, int64_t number)
{
    ss_pack pack;
    pack.begin = number * SS_PACK - span.shift;
    pack.from = pack.begin < 0 ? (int)(pack.begin < -SS_PACK ? SS_PACK : -pack.begin) : 0;
    int64_t left = span.n - pack.begin;
    pack.to = left < 0 ? 0 : left < SS_PACK ? (int)left : SS_PACK;
    pack.vector = span.vector && pack.from == 0 && pack.to == SS_PACK;
    return pack;
}

template <class T> SS_ON_DEVICE void ss_load(const ss_pack &pack, const typename T::raw *x, typename T::raw out[SS_PACK])
{
    if (pack.vector) {
        ss_16_bytes words[SS_PACK * sizeof(typename T::raw) / 16];
        const ss_16_bytes *from = (const ss_16_bytes *)(x + pack.begin);
        SS_UNROLL
        for (size_t k = 0; k < sizeof words / 16; k++) {
            words[k] = from[k];
        }
        memcpy(out, words, sizeof words);
    } else {
        SS_UNROLL
        for (int k = 0; k < SS_PACK; k++) {
            out[k] = k >= pack.from && k < pack.to ? x[pack.begin + k] : typename T::raw(0);
        }
    }
}

template <class T> SS_ON_DEVICE void ss_store(const ss_pack &pack, typename T::raw *x, const typename T::raw in[SS_PACK])
{
    if (pack.vector) {
        ss_16_bytes words[SS_PACK * sizeof(typename T::raw) / 16];
        memcpy(words, in, sizeof words);
        ss_16_bytes *to = (ss_16_bytes *)(x + pack.begin);
        SS_UNROLL
        for (size_t k = 0; k < sizeof words / 16; k++) {
            ss_store_16(to + k, words[k]);
        }
    } else {
        SS_UNROLL
        for (int k = 0; k < SS_PACK; k++) {
            if (k >= pack.from && k < pack.to) {
                x[pack.begin + k] = in[k];
            }
        }
    }
}

/* The shift with which whole packs are aligned in as many arrays as there are, if there is one. */
static inline ss_span ss_span_over(int64_t n, const void *const *arrays, const size_t *elements, int count)
{
    for (int shift = 0; shift < SS_PACK; shift++) {
        bool fits = true;
        for (int k = 0; k < count; k++) {
            fits = fits && ss_fits(arrays[k], elements[k], shift);
        }
        if (fits) {
            return {n, shift, 1};
        }
    }
    return {n, 0, 0};
}

/* The ranges of one launch. Chunks first[i] to first[i + 1] - 1 are range i's. */
template <class Entry> struct ss_table {
    int32_t count;
    int32_t first[SS_CUDA_PIECES_PER_LAUNCH + 1];
    Entry entry[SS_CUDA_PIECES_PER_LAUNCH];
};

/* The range of a chunk: the last whose first chunk is not behind it. */
template <class Entry> SS_ON_DEVICE int32_t ss_range_of(const ss_table<Entry> &table, int64_t chunk)
{
    int32_t low = 0, high = table.count;
    while (high - low > 1) {
        int32_t middle = (low + high) / 2;
        if (table.first[middle] <= chunk) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Adds a range to a table that has room for it; ranges without elements may be among them. */
template <class Entry> int ss_add(ss_table<Entry> *table, const Entry &entry)
{
    int64_t chunks = table->first[table->count] + ss_span_chunks(entry.span);
    if (chunks > INT32_MAX) { /* 35 trillion elements in one launch */
        return SS_CUDA_ERR_ARGUMENT;
    }
    table->entry[table->count] = entry;
    table->count++;
    table->first[table->count] = (int32_t)chunks;
    return SS_CUDA_OK;
}

template <class Entry> void ss_clear(ss_table<Entry> *table)
{
    table->count = 0;
    table->first[0] = 0;
}

template <class Work> int ss_run_table(const typename Work::table &table, void *stream)
{
    return ss_run<Work>(table, table.first[table.count], stream);
}

/* for (every launch's share of a table of n entries, that is `count` from `first` on) */
#define SS_EACH_LAUNCH(n, first, count)                                                                           \
    for (int32_t first = 0, count; first < (n) && (count = ss_least((n) - first, SS_CUDA_PIECES_PER_LAUNCH), true); \
         first += count)

static inline int32_t ss_least(int32_t a, int32_t b) { return a < b ? a : b; }

#endif
