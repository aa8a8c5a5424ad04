/*
 * Picks the kernels for the processor it runs on.
 *
 * Files to compile, all with the same flags, include path csrc, linked with -lm; none needs a flag of its own, and
 * those of another architecture compile to nothing:
 *
 *     dispatch.c kernels_portable.c kernels_avx2.c kernels_avx512.c
 *     -std=c11 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden
 *
 * A sqrtf that might set errno and comparisons that might trap would keep the loops from vectorising; gcc does not
 * take the first from a pragma. Neither flag changes a result. Contraction would, hence -ffp-contract=off.
 */
#include <stddef.h>
#include <string.h>

#include "kernels/variants.h"

/* Best first. */
static const ss_kernels *const variants[] = {
#if SS_HAVE_X86_VARIANTS
    &ss_kernels_avx512,
    &ss_kernels_avx2,
#endif
    &ss_kernels_portable,
};

static int runs_here(const ss_kernels *kernels)
{
#if SS_HAVE_X86_VARIANTS
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (kernels == &ss_kernels_avx2) {
        return avx2;
    }
    if (kernels == &ss_kernels_avx512) {
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
#endif
    return kernels == &ss_kernels_portable;
}

const ss_kernels *ss_kernels_get(const char *isa)
{
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        if ((isa == NULL || strcmp(isa, variants[i]->isa) == 0) && runs_here(variants[i])) {
            return variants[i];
        }
    }
    return NULL;
}
