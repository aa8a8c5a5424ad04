// Named ranges in torch's profiler: "shardstep::reduce bucket 3". Without a profiler they cost one look at a thread-local.
#include <Python.h>

#include <ATen/record_function.h>

#include <string>

#include "shim/shim.h"

extern "C" void* ss_shim_span_begin(void*, const char* what, int32_t bucket)
{
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks.has_value()) {
        return nullptr;
    }
    auto* span = new at::RecordFunction(std::move(*callbacks));
    span->before(bucket < 0 ? std::string(what) : what + (" bucket " + std::to_string(bucket)));
    return span;
}

extern "C" void ss_shim_span_end(void* span) { delete static_cast<at::RecordFunction*>(span); }
