/*
 * Kernels for AVX2 with FMA and F16C. The pragma comes before anything is included, so that it governs every function
 * of this file and no per-file compiler flag is needed.
 */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma,f16c")
#endif

#include "kernels/variants.h"

#if SS_HAVE_X86_VARIANTS
#define SS_KERNELS_TABLE ss_kernels_avx2
#define SS_KERNELS_ISA "avx2"
#include "kernels/kernels_impl.h"
#endif
