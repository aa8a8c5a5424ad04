/* Kernels for AVX-512 (F, BW, DQ, VL). On the pragma: kernels_avx2.c. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#include "kernels/variants.h"

#if SS_HAVE_X86_VARIANTS
#define SS_KERNELS_TABLE ss_kernels_avx512
#define SS_KERNELS_ISA "avx512"
#include "kernels/kernels_impl.h"
#endif
