#include "core/balance.h"

#include <stdbool.h>
#include <stdlib.h>

static int longest_first(const void *a, const void *b)
{
    const ss_item *x = a, *y = b;
    if (x->size != y->size) {
        return x->size < y->size ? 1 : -1;
    }
    return x->key < y->key ? -1 : x->key > y->key;
}

static int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

/*
 * Puts every item to the first rank that has room; false when one finds none. `room` is a binary tree in an array: node k
 * has children 2k and 2k + 1, leaf `leaves + r` is the room of rank r, and a node has the most room of the leaves below it.
 */
static bool pack(ss_item *items, int32_t n, int64_t capacity, int64_t *room, int leaves, int world)
{
    for (int r = 0; r < leaves; r++) {
        room[leaves + r] = r < world ? capacity : -1;
    }
    for (int node = leaves - 1; node > 0; node--) {
        room[node] = max_of(room[2 * node], room[2 * node + 1]);
    }
    for (int32_t k = 0; k < n; k++) {
        int node = 1;
        if (room[node] < items[k].size) {
            return false;
        }
        while (node < leaves) {
            node = room[2 * node] >= items[k].size ? 2 * node : 2 * node + 1;
        }
        items[k].rank = node - leaves;
        room[node] -= items[k].size;
        while ((node /= 2) > 0) {
            room[node] = max_of(room[2 * node], room[2 * node + 1]);
        }
    }
    return true;
}

int64_t ss_balance(ss_item *items, int32_t n, int world)
{
    int leaves = 1;
    while (leaves < world) {
        leaves *= 2;
    }
    int64_t *room = malloc(2 * (size_t)leaves * sizeof *room);
    if (room == NULL) {
        return -1;
    }
    qsort(items, (size_t)n, sizeof *items, longest_first);
    int64_t sum = 0, longest = n > 0 ? items[0].size : 0;
    for (int32_t k = 0; k < n; k++) {
        sum += items[k].size;
    }
    int64_t mean = (sum + world - 1) / world;
    int64_t low = max_of(mean, longest), high = max_of(2 * mean, longest); /* at `high` it always succeeds */
    if (pack(items, n, low, room, leaves, world)) {
        high = low;
    }
    while (high - low > low / 200 + 1) {
        int64_t middle = low + (high - low) / 2;
        if (pack(items, n, middle, room, leaves, world)) {
            high = middle;
        } else {
            low = middle;
        }
    }
    pack(items, n, high, room, leaves, world);
    int64_t least = high;
    for (int r = 0; r < world; r++) {
        least = least < room[leaves + r] ? least : room[leaves + r];
    }
    free(room);
    return high - least;
}
