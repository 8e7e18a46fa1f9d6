// The Python face of the native kernels: argument checks, GIL release, nothing else.
#include <nanobind/nanobind.h>

NB_MODULE(_native, m) { m.doc() = "kvtier native kernels"; }
