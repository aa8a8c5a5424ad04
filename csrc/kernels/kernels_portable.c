/* Kernels for any processor: the reference that the other variants must equal. Without an FMA unit fmaf is libm's. */
#include "kernels/variants.h"

#define SS_KERNELS_TABLE ss_kernels_portable
#define SS_KERNELS_ISA "portable"
#include "kernels/kernels_impl.h"
