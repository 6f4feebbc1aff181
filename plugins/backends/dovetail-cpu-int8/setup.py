"""Compiles the library when the package is built. It calls nothing of Python, so one wheel serves every version."""

from setuptools import Extension, setup

SOURCES = [f"c/{name}.c" for name in ("rows", "rows_plain", "rows_avx2", "rows_avx512")]
# Sums round as they stand in the source; infinity and NaN stay, only traps and errno are given up.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]

setup(
    ext_modules=[
        Extension(
            "dovetail_cpu_int8._rows",
            SOURCES,
            depends=["c/rows.h", "c/rows_body.h"],
            extra_compile_args=FLAGS,
            libraries=["m"],
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
