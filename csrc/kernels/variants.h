/* The compiled variants of the kernels, for dispatch.c only. */
#ifndef SHARDSTEP_KERNELS_VARIANTS_H
#define SHARDSTEP_KERNELS_VARIANTS_H

#include "kernels/kernels.h"

/* `#pragma GCC target` for a whole file is a gcc feature; other compilers build the portable variant alone. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SS_HAVE_X86_VARIANTS 1
#else
#define SS_HAVE_X86_VARIANTS 0
#endif

extern const ss_kernels ss_kernels_portable, ss_kernels_avx2, ss_kernels_avx512;

#endif
