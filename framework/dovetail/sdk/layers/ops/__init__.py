"""Operations behind the layers: `reference` in plain torch says what each means; others are ours for CUDA tensors.

Most are rows of `dovetail.contracts.kernels.OPS`, which layers bind when they are built.
"""
