#define _GNU_SOURCE
#include "core/origin.h"

#include <sys/mman.h>
#include <unistd.h>

static size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

ss_code ss_origin_mark(ss_origin *origin, ss_error *err)
{
    uint8_t *page = mmap(NULL, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "no memory for a page");
    }
    if (madvise(page, page_bytes(), MADV_WIPEONFORK) != 0) {
        munmap(page, page_bytes());
        return ss_fail(err, SS_ERR_TRANSPORT, "this kernel cannot wipe a page on fork: Linux 4.14 or newer is needed");
    }
    *page = 1;
    origin->page = page;
    return SS_OK;
}

void ss_origin_forget(ss_origin *origin)
{
    if (origin->page != NULL) {
        munmap((void *)origin->page, page_bytes());
        origin->page = NULL;
    }
}
