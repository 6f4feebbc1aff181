"""The conformance kit, with a block smaller than most contexts."""

from dovetail_testing import AttentionBackendConformance


class TestBlockwise(AttentionBackendConformance):
    name = "blockwise"
    options = {"block": 5}  # noqa: RUF012


class TestOneBlock(AttentionBackendConformance):
    name = "blockwise"
