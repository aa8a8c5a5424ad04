/* Gives ctypes an entry point to what kernels.h defines inline. */
#include "kernels/kernels.h"

int64_t test_adam_tail(int64_t numel, int64_t offset, int64_t n);

int64_t test_adam_tail(int64_t numel, int64_t offset, int64_t n) { return ss_adam_tail(numel, offset, n); }
