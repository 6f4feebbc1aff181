"""`python -m dovetail_backends.fa4_worker VARIANTS`: compiles kernels of FlashAttention-4, without a GPU.

Started by `fa4_library`. VARIANTS is JSON, `Variant`s as they are written there. Tensors are fake: the library then
compiles, keeps what it compiled, and launches nothing.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dovetail_backends.fa4_library import Variant, find_library, launch


def main(argv: list[str]) -> int:
    """Compile one after the other; the exit code says whether all went well."""
    os.nice(5)
    warnings.simplefilter("ignore")
    build = find_library()
    if isinstance(build, str):
        print(build, file=sys.stderr)
        return 1
    num_failed = 0
    for given in json.loads(argv[0]):
        variant = Variant(**{**given, "heads": tuple(given["heads"])})
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                launch(build, variant, torch.device("cuda"))
        except Exception as error:  # it is compiled where it is launched, which says what is wrong with it
            print(f"{variant}: {type(error).__name__}: {error}", file=sys.stderr)
            num_failed += 1
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
