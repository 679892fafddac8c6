// What each file of bindings adds to the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace trimaran {

void bind_artifact(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_executor(nanobind::module_& module);
void bind_linear(nanobind::module_& module);
void bind_probe(nanobind::module_& module);
void bind_rows(nanobind::module_& module);
void bind_sampler(nanobind::module_& module);

}  // namespace trimaran
